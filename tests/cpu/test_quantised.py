"""Quantised bases: bitsandbytes' own bits, one dequantisation a product, a dense model's arithmetic, clear refusals.

Letters: O out features, D in features.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

import mlora
from mlora import cli
from mlora.config import RunConfig, parse_config
from mlora.engine.memory import MemoryModel
from mlora.engine.verify import verify_run
from mlora.models import quantised
from mlora.models.decoder import Decoder
from mlora.models.quantised import FrozenLinears, QuantisedWeight, choose_quantization
from mlora.models.spec import ModelSpec, Quantization, linear_shapes, load_spec
from mlora.models.weights import Checkpoint
from mlora.types import MERGED_LINEARS, UserError, linear_names, module_name
from tests.cpu.packing import packed
from tests.cpu.runs import assert_company_changes_no_bit, outcome, run, subject_and_other, write_rows
from tests.cpu.test_models_logits import no_adapters
from tests.cpu.tiny import VOCAB, save_tiny, tiny_tokenizer

CPU = torch.device("cpu")
KINDS = {
    "nf4": Quantization(kind="nf4"),
    "nf4 double": Quantization(kind="nf4", double=True),
    "fp4": Quantization(kind="fp4"),
    "fp4 double": Quantization(kind="fp4", double=True),
    "int8": Quantization(kind="int8"),
}
KEYS = {
    name: {"quantization": kind.kind} | ({"double_quantization": True} if kind.double else {})
    for name, kind in KINDS.items()
}


def bnb_config(quantization: Quantization, **changes: object) -> BitsAndBytesConfig:
    """The same as transformers says it."""
    if quantization.kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, **changes)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.kind,
        bnb_4bit_use_double_quant=quantization.double,
        **changes,
    )


def with_bitsandbytes(
    folder: Path, config: BitsAndBytesConfig, dtype: torch.dtype, device: torch.device = CPU
) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config, device_map=device.type)


def kept_tensors(weight: torch.nn.Parameter) -> list[torch.Tensor]:
    """What bitsandbytes keeps of a weight: its numbers, its scales and theirs."""
    if hasattr(weight, "SCB"):
        return [weight.data, weight.SCB]
    state = weight.quant_state
    return [
        weight.data,
        state.absmax,
        *((state.offset, state.state2.absmax, state.state2.code) if state.nested else ()),
    ]


def our_tensors(part: object) -> list[torch.Tensor]:
    if isinstance(part, quantised.Int8Weight):
        return [part.values_OD, part.steps_O1[:, 0]]
    assert isinstance(part, quantised.FourBitWeight)
    state = part.state
    return [
        part.packed,
        state.absmax,
        *((state.offset, state.state2.absmax, state.state2.code) if state.nested else ()),
    ]


def parts(
    folder: Path, quantization: Quantization, dtype: torch.dtype, device: torch.device = CPU
) -> Iterator[tuple[str, object]]:
    """Every linear of the model as the engine keeps it, by its global name."""
    spec = load_spec(folder)
    checkpoint = Checkpoint(folder, spec)
    linears = FrozenLinears(spec, checkpoint.stored or quantization, dtype, device)
    for layer in range(spec.num_layers):
        for merged, paths in MERGED_LINEARS.items():
            weight = linears.weight(checkpoint.layer(layer), layer, merged)
            assert isinstance(weight, QuantisedWeight)
            for path, (_, part) in zip(paths, weight.parts, strict=True):
                yield module_name(layer, path), part


def decoder(folder: Path, quantization: Quantization | None, dtype: torch.dtype = torch.float32) -> Decoder:
    spec = load_spec(folder)
    return Decoder(spec, Checkpoint(folder, spec), range(spec.num_layers), dtype, CPU, quantization)


def merged_weights(model: Decoder) -> dict[tuple[int, str], torch.Tensor]:
    return {(i, m): w.matrix().clone() for i, layer in model._layers.items() for m, w in layer._weights.items()}


def dequantised_copy(folder: Path, quantization: Quantization, target: Path, device: torch.device = CPU) -> Path:
    """A dense checkpoint of the dequantised weights in float32."""
    tensors = load_file(folder / "model.safetensors", device=device.type)
    for name, part in parts(folder, quantization, torch.float32, device):
        part.write(tensors[f"{name}.weight"])
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "llama3.1")


@pytest.fixture(scope="module")
def stored(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The model as transformers and bitsandbytes store it, by kind."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("stored")
            with_bitsandbytes(model, bnb_config(KINDS[name]), torch.float32).save_pretrained(made[name])
            tiny_tokenizer().save_pretrained(made[name])
        return made[name]

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_the_bits_are_those_of_transformers_with_bitsandbytes(model: Path, name: str, dtype: torch.dtype) -> None:
    theirs = with_bitsandbytes(model, bnb_config(KINDS[name]), dtype)
    assert not hasattr(theirs.lm_head.weight, "quant_state") and theirs.lm_head.weight.dtype == dtype
    for linear, part in parts(model, KINDS[name], dtype):
        weight = theirs.get_submodule(linear).weight
        expected, ours = kept_tensors(weight), our_tensors(part)
        if name == "int8":
            expected[1] = expected[1].mul(1.0 / 127.0)
        assert len(expected) == len(ours)
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(ours, expected, strict=True)), linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KINDS)
def test_a_weight_is_dequantised_as_bitsandbytes_does(model: Path, name: str, dtype: torch.dtype) -> None:
    theirs = with_bitsandbytes(model, bnb_config(KINDS[name]), dtype)
    for linear, part in parts(model, KINDS[name], dtype):
        weight = theirs.get_submodule(linear).weight
        if name == "int8":  # as its MatMul8bitFp, what it trains with on CPUs
            expected = weight.data.to(dtype).mul_(weight.SCB.unsqueeze(1).mul(1.0 / 127.0))
        else:
            expected = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        out_OD = torch.empty(expected.shape, dtype=dtype)
        part.write(out_OD)
        assert torch.equal(out_OD, expected), linear


@pytest.mark.parametrize("name", KINDS)
def test_what_transformers_has_stored_loads_as_it_is(model: Path, stored: Callable[[str], Path], name: str) -> None:
    folder = stored(name)
    spec = load_spec(folder)
    checkpoint = Checkpoint(folder, spec)
    assert checkpoint.stored == KINDS[name]
    pairs = zip(parts(folder, KINDS[name], torch.float32), parts(model, KINDS[name], torch.float32), strict=True)
    for (linear, from_file), (_, made) in pairs:
        assert all(torch.equal(x, y) for x, y in zip(our_tensors(from_file), our_tensors(made), strict=True)), linear
    ours, theirs = merged_weights(decoder(folder, checkpoint.stored)), merged_weights(decoder(model, KINDS[name]))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float64])
def test_four_bits_stored_in_another_dtype_and_with_skipped_modules(
    model: Path, tmp_path: Path, storage: torch.dtype
) -> None:
    skipped = ["lm_head", "k_proj"]
    config = bnb_config(KINDS["nf4 double"], bnb_4bit_quant_storage=storage, llm_int8_skip_modules=skipped)
    with_bitsandbytes(model, config, torch.bfloat16).save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert load_file(tmp_path / "model.safetensors")[name].dtype == storage
    checkpoint = Checkpoint(tmp_path, load_spec(tmp_path))
    assert checkpoint.stored is not None and len(checkpoint.stored.dense) == 3
    asked = parse_config(tree(model, **KEYS["nf4 double"], quantization_skip_modules=["k_proj"]))
    same = choose_quantization(asked, load_spec(model), Checkpoint(model, load_spec(model)))
    assert same == checkpoint.stored
    ours = merged_weights(decoder(tmp_path, checkpoint.stored, torch.bfloat16))
    theirs = merged_weights(decoder(model, same, torch.bfloat16))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_stored_weight_is_no_view_of_its_file(stored: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("nf4", "int8"):
        folder = tmp_path / name
        folder.mkdir()
        for file in stored(name).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        model = decoder(folder, load_spec(folder).stored)
        before = merged_weights(model)
        with (folder / "model.safetensors").open("r+b") as file:
            file.write(bytes((folder / "model.safetensors").stat().st_size))
        assert all(torch.equal(weight, before[key]) for key, weight in merged_weights(model).items())


@pytest.mark.parametrize("name", KINDS)
def test_a_quantised_base_is_a_dense_one_with_the_dequantised_weights(tmp_path: Path, model: Path, name: str) -> None:
    """The same bits over a training with dropout, so the same as a dense model in all that other tests say of one."""
    dense = dequantised_copy(model, KINDS[name], tmp_path / "dense")
    adapters = subject_and_other(tmp_path)[:1]
    ours = outcome(run(tmp_path / "a", model, adapters, **KEYS[name]), "subject")
    theirs = outcome(run(tmp_path / "b", dense, adapters), "subject")
    original = outcome(run(tmp_path / "c", model, adapters), "subject")
    assert not ours.differences(theirs)
    assert ours.differences(original)


@pytest.mark.parametrize("name", ["nf4 double", "int8"])
def test_an_adapter_of_a_stored_base_gives_the_engines_logits_in_peft(
    tmp_path: Path, stored: Callable[[str], Path], name: str
) -> None:
    results = run(tmp_path / "run", stored(name), subject_and_other(tmp_path)[:1])
    config = json.loads((results.adapters["subject"].folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(stored(name))
    (check,) = verify_run(tmp_path / "run")
    assert check.ok, check


@pytest.mark.parametrize("name", ["nf4 double", "int8"])
def test_a_base_stored_in_16_bits_and_less_is_verified_in_32(tmp_path: Path, name: str) -> None:
    """transformers leaves what is not quantised in the stored dtype, and dequantises to it."""
    with_biases = save_tiny(tmp_path / "model", "qwen2")
    with_bitsandbytes(with_biases, bnb_config(KINDS[name]), torch.bfloat16).save_pretrained(tmp_path / "stored")
    tiny_tokenizer().save_pretrained(tmp_path / "stored")
    run(tmp_path / "run", tmp_path / "stored", subject_and_other(tmp_path)[:1])
    (check,) = verify_run(tmp_path / "run")
    assert check.ok, check


@pytest.mark.parametrize("name", ["nf4 double", "int8"])
def test_company_cuts_stages_and_recompute_change_no_bit(tmp_path: Path, model: Path, name: str) -> None:
    assert_company_changes_no_bit(tmp_path, model, **KEYS[name])


@pytest.mark.parametrize("recompute", [False, True])
@torch.no_grad()
def test_every_weight_is_dequantised_once_a_pass_into_the_same_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    slice_ = decoder(model, KINDS["nf4 double"])
    seen: list[tuple[object, int]] = []
    original = quantised.FourBitWeight.write

    def spy(self: quantised.FourBitWeight, out_OD: torch.Tensor) -> None:
        seen.append((id(self), out_OD.untyped_storage().data_ptr()))
        original(self, out_OD)

    monkeypatch.setattr(quantised.FourBitWeight, "write", spy)
    linears = len(linear_names(slice_.spec.num_layers))
    microbatch = packed({0: (9, 7), 1: (5,), 2: (11,)})
    banks = no_adapters(slice_)
    x_TD = slice_.embed(torch.randint(VOCAB, (microbatch.rows,), generator=torch.Generator().manual_seed(1)))
    out_TD, kept = slice_.forward(x_TD, slice_.pack(microbatch), banks, recompute)
    assert len(seen) == len({weight for weight, _ in seen}) == linears
    slice_.backward(kept, out_TD)
    assert len(seen) == (3 if recompute else 2) * linears
    assert len({memory for _, memory in seen}) == 1


_PEAK = """
import sys
from pathlib import Path
import bitsandbytes, torch
from mlora.models.decoder import Decoder
from mlora.models.spec import Quantization, load_spec
from mlora.models.weights import Checkpoint

def read(key):
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key)]
    return int(line.split()[1]) * 1024

folder, kind = Path(sys.argv[1]), sys.argv[2]
spec = load_spec(folder)
small = Quantization(kind="nf4", double=True) if kind == "nf4" else Quantization(kind="int8")
bitsandbytes.functional.quantize_4bit(torch.ones(64, 64), quant_type="nf4")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = read("VmRSS")
stored = Checkpoint(folder, spec)
layers, cpu = range(spec.num_layers), torch.device("cpu")
model = Decoder(spec, stored, layers, torch.bfloat16, cpu, None if kind == "none" else small)
print(read("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peaks from Linux' /proc")
def test_the_16_bit_model_is_never_in_memory(tmp_path: Path) -> None:
    """Peaks of loading in processes of their own, pages of the mapped file counted too."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    config.save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    shapes = {f"{name}.weight": linear_shapes(spec)[name.split(".")[-1]] for name in linear_names(spec.num_layers)}
    norms = ("input_layernorm", "post_attention_layernorm")
    shapes |= {f"model.layers.{i}.{norm}.weight": (512,) for i in range(spec.num_layers) for norm in norms}
    shapes |= {"model.embed_tokens.weight": (64, 512), "lm_head.weight": (64, 512), "model.norm.weight": (512,)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    whole = sum(tensor.nbytes for tensor in tensors.values())
    del tensors

    def peak(kind: str) -> int:
        command = [sys.executable, "-c", _PEAK, str(tmp_path), kind]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(done.stdout.split()[-1])

    assert peak("none") > whole, "the measurement does not see the model"
    # What is kept is 0.27 and 0.51 of 16 bits; a layer's pages, a weight being quantised and the buffer are the rest.
    for kind, most in (("nf4", 0.65), ("int8", 0.85)):
        assert peak(kind) < most * whole, kind


@pytest.mark.parametrize("name", KINDS)
def test_the_memory_model_knows_the_sizes(model: Path, name: str) -> None:
    quantization = Quantization(
        kind=KINDS[name].kind, double=KINDS[name].double, dense=frozenset({"model.layers.2.mlp.down_proj"})
    )
    spec = load_spec(model)
    layers = (1, 2)
    memory = MemoryModel(
        spec=spec, dtype=torch.bfloat16, layers=layers, in_flight=(1, 1), adapters=(), quantization=quantization
    )
    for stage, held in enumerate((range(1), range(1, 3))):
        slice_ = Decoder(spec, Checkpoint(model, spec), held, torch.bfloat16, CPU, quantization)
        bytes_ = sum(
            x.nbytes for x in (getattr(slice_, "embedding_VD", None), getattr(slice_, "head_VD", None)) if x is not None
        )
        for layer in slice_._layers.values():
            bytes_ += layer._norm_1.nbytes + layer._norm_2.nbytes
            for weight in layer._weights.values():
                if isinstance(weight, quantised.DenseWeight):
                    bytes_ += weight.weight_OD.nbytes
                    continue
                buffer = weight.buffer.nbytes
                for _, part in weight.parts:
                    tensors = our_tensors(part)
                    bytes_ += sum(x.nbytes for x in tensors[:4])  # the code of double quantisation is shared by all
        assert memory.need(stage, 16, False).weights == bytes_ + buffer


def test_8b_in_nf4_takes_what_the_page_says(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    config.save_pretrained(tmp_path)
    sizes = {}
    for name, quantization in ({"none": None} | KINDS).items():
        memory = MemoryModel(
            spec=load_spec(tmp_path),
            dtype=torch.bfloat16,
            layers=(32,),
            in_flight=(1,),
            adapters=(),
            quantization=quantization,
        )
        sizes[name] = round(memory.need(0, 16, False).weights / 2**30, 2)
    assert sizes == {"none": 14.96, "nf4": 5.83, "nf4 double": 5.53, "fp4": 5.83, "fp4 double": 5.53, "int8": 8.68}


def tree(base: Path, **top: object) -> dict[str, object]:
    return {"base_model": str(base), "adapters": [{"name": "a", "dataset": "none.jsonl"}], **top}


def chosen(base: Path, **top: object) -> Quantization | None:
    config: RunConfig = parse_config(tree(base, **top))
    spec: ModelSpec = load_spec(base)
    return choose_quantization(config, spec, Checkpoint(base, spec))


def test_what_the_configuration_asks_for(model: Path, stored: Callable[[str], Path]) -> None:
    assert chosen(model) is None
    for name, quantization in KINDS.items():
        assert chosen(model, **KEYS[name]) == quantization
        assert chosen(stored(name)) == chosen(stored(name), **KEYS[name]) == quantization
    skipped = chosen(model, quantization="nf4", quantization_skip_modules=["down_proj", "layers.1.self_attn"])
    assert skipped is not None
    assert skipped.dense == {f"model.layers.{i}.mlp.down_proj" for i in range(3)} | {
        f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"
    }


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("top", "words"),
    [
        ({"double_quantization": True}, "double_quantization: nothing is quantised without quantization"),
        ({"quantization_skip_modules": ["q_proj"]}, "quantization_skip_modules: nothing is quantised"),
        ({"quantization": "nf4", "quantization_skip_modules": ["lm_head"]}, "'lm_head' is no linear of the model's"),
        ({"quantization": "int8", "double_quantization": True}, "double_quantization: int8 has one scale a row"),
        ({"quantization": "nf5"}, "did you mean 'nf4'"),
        ({"load_in_4bit": True}, "load_in_4bit: True is not supported: write quantization: nf4"),
    ],
)
def test_contradictions_are_refused(model: Path, top: dict[str, object], words: str) -> None:
    assert words in refusal(lambda: chosen(model, **top))


@pytest.mark.parametrize(
    "top", [{"quantization": "int8"}, {"double_quantization": True}, {"quantization_skip_modules": ["q_proj"]}]
)
def test_stored_weights_are_used_as_they_are(stored: Callable[[str], Path], top: dict[str, object]) -> None:
    text = refusal(lambda: chosen(stored("nf4"), **top))
    assert "are stored as nf4 and used as they are" in text


@pytest.mark.parametrize("method", ["gptq", "awq", "aqlm", "compressed-tensors", "fp8", None])
def test_other_forms_are_refused_by_name_before_anything_is_loaded(
    model: Path, tmp_path: Path, method: str | None
) -> None:
    """Nothing but config.json is there, so nothing else can have been read."""
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4} if method else {"bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = refusal(lambda: run(tmp_path / "run", tmp_path, [{"name": "a", "dataset": "none.jsonl"}]))
    assert repr(method) in text and "only that of bitsandbytes" in text and "quantization: nf4" in text


@pytest.mark.parametrize("names", [("qweight", "qzeros", "scales"), ("weight_packed", "weight_scale")])
def test_other_forms_of_which_the_configuration_says_nothing_are_told(
    model: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """GPTQ's and AWQ's older files have a quantize_config.json of their own, compressed-tensors' another key."""
    linear = "model.layers.0.self_attn.q_proj"

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{linear}.weight"]
        tensors.update({f"{linear}.{name}": torch.zeros(8, 64, dtype=torch.int32) for name in names})

    folder = copied(model, tmp_path / "model", pack)
    text = refusal(lambda: Checkpoint(folder, load_spec(folder)))
    assert f"{linear}.{names[0]} stands in the place of {linear}.weight" in text and "quantization: nf4" in text


def test_without_bitsandbytes_the_extra_is_named_before_anything_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))
    monkeypatch.setattr(Checkpoint, "layer", None)
    text = refusal(lambda: run(tmp_path, model, [{"name": "a", "dataset": "none.jsonl"}], quantization="nf4"))
    assert text == "quantization: nf4 needs bitsandbytes: pip install 'mlora-engine[quant]'"


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_check_and_plan_know_the_sizes_without_bitsandbytes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Nor need they what multiplies in FP8: they may run on another machine than the training."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    monkeypatch.setattr(torch, "_scaled_mm", None)
    rows = write_rows(tmp_path / "rows.jsonl", 20, seed=1)
    config = tmp_path / "run.yaml"
    keys = {"quantization": kind, "dtype": "bfloat16"}
    config.write_text(json.dumps(tree(model, **keys) | {"adapters": [{"name": "a", "dataset": str(rows)}]}))
    spec = load_spec(model)
    memory = MemoryModel(
        spec=spec,
        dtype=torch.bfloat16,
        layers=(3,),
        in_flight=(1,),
        adapters=(),
        quantization=Quantization(kind=kind),  # type: ignore[arg-type]
    )
    assert cli.main(["check", str(config)]) == 0
    size = memory.need(0, 16, False).weights
    assert f"weights    {size / 2**20:,.2f} MiB in one stage: linears {kind}, the rest" in capsys.readouterr().out
    assert cli.main(["plan", str(config), "--stages", "2", "--picture", str(tmp_path / "plan.svg")]) == 0
    assert "predicted bubble" in capsys.readouterr().out


def test_a_device_that_bitsandbytes_does_not_know_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise NotImplementedError("no kernel for\nthis device")

    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", broken)
    text = refusal(lambda: run(tmp_path, model, [{"name": "a", "dataset": "none.jsonl"}], quantization="nf4"))
    assert text.startswith(
        "quantization: bitsandbytes does not work on this cpu: no kernel for this device; bring it up"
    )


def test_float64_is_refused(model: Path, tmp_path: Path) -> None:
    adapters = [{"name": "a", "dataset": "none.jsonl"}]
    assert "float64 is finer" in refusal(lambda: run(tmp_path, model, adapters, quantization="nf4", dtype="float64"))


def copied(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


DAMAGES: dict[str, tuple[str, Callable[[dict[str, torch.Tensor], str], object]]] = {
    "weight cut": ("nf4", lambda t, n: t.update({f"{n}.weight": t[f"{n}.weight"][1:].clone()})),
    "no scales": ("nf4", lambda t, n: t.pop(f"{n}.weight.absmax")),
    "no state": ("nf4", lambda t, n: t.pop(f"{n}.weight.quant_state.bitsandbytes__nf4")),
    "float weight": ("int8", lambda t, n: t.update({f"{n}.weight": t[f"{n}.weight"].float()})),
    "scales cut": ("int8", lambda t, n: t.update({f"{n}.SCB": t[f"{n}.SCB"][1:].clone()})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_that_headers_show_is_named(stored: Callable[[str], Path], tmp_path: Path, damage: str) -> None:
    name = "model.layers.1.mlp.up_proj"
    kind, change = DAMAGES[damage]
    folder = copied(stored(kind), tmp_path / "model", lambda tensors: change(tensors, name))
    text = refusal(lambda: Checkpoint(folder, load_spec(folder)))
    assert text.startswith(f"{folder / 'model.safetensors'}: {name}.weight")
    assert "is not what bitsandbytes stores" in text


@pytest.mark.parametrize("blob", [b"{", b"[]", b'{"quant_type": "nf4"}'])
def test_damage_that_headers_do_not_show_is_named(stored: Callable[[str], Path], tmp_path: Path, blob: bytes) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    state = torch.tensor(list(blob), dtype=torch.uint8)
    folder = copied(
        stored("nf4 double"),
        tmp_path / "model",
        lambda tensors: tensors.update({f"{name}.quant_state.bitsandbytes__nf4": state}),
    )
    assert refusal(lambda: decoder(folder, load_spec(folder).stored)).startswith(f"{name}: the scales stored with it")


def test_quantised_weights_without_a_word_in_the_configuration(stored: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied(stored("nf4"), tmp_path / "model", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "is stored as U8, which is no float" in refusal(lambda: Checkpoint(folder, load_spec(folder)))


def test_a_word_in_the_configuration_without_quantised_weights(
    model: Path, stored: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(model, tmp_path / "model", lambda tensors: None)
    (folder / "config.json").write_bytes((stored("nf4") / "config.json").read_bytes())
    assert "but the weights are floats" in refusal(lambda: Checkpoint(folder, load_spec(folder)))


def test_a_run_does_not_go_on_with_other_weights(tmp_path: Path, model: Path) -> None:
    subject, _ = subject_and_other(tmp_path)
    run(tmp_path / "run", model, [subject], quantization="nf4")
    config = {"base_model": str(model), "output_dir": str(tmp_path / "run"), "adapters": [subject | {"max_steps": 6}]}
    text = refusal(lambda: mlora.train(config, resume="auto"))
    assert "quantization is none and was nf4" in text


def test_of_what_bitsandbytes_says_only_its_advice_on_a_kernel_is_kept_back(caplog):
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "no such module")
    logger.warning("anything else")
    assert caplog.messages == ["anything else"]
