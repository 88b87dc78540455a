"""Breaks each invariant on purpose and sees its test fail: ``python tests/mutants/run.py [NAME …]``.

Every ``NAME.patch`` is applied to a copy of the code, and the test that the table names must then fail there. A mutant
that survives, and a patch that no longer applies, make this program end with exit code 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARITY = "tests/cpu/test_parity.py::test_adapters_together_equal_their_own_peft_runs[float64-1e-09-1e-09]"
SHARED = "tests/cpu/test_solo_shared.py"
STAGES = "tests/cpu/test_stages.py::test_stages_change_no_bit"
POISON = "tests/cpu/test_poison.py"
EXPORT = "tests/cpu/test_export.py"
RESUME = "tests/cpu/test_resume.py"
CRASH = f"{RESUME}::test_a_crash_changes_no_bit_also_over_other_stages"
MIXTURE = "tests/cpu/test_mixture.py"
VERSIONS = "tests/cpu/test_versions.py"
ISOLATION = "tests/cpu/test_isolation.py"
EVALUATION = "tests/cpu/test_evaluation.py"
KERNELS = "tests/kernels/test_company.py"
QUANTISED = "tests/cpu/test_quantised.py"
FP8 = "tests/cpu/test_fp8.py"
DENSE = "test_a_quantised_base_is_a_dense_one_with_the_dequantised_weights"
REPLICAS = "tests/multiproc/test_training.py::test_replicas_give_the_bits_of_one"
PADDED = "tests/cpu/test_ops_batch_lora.py::test_small_products_are_padded_on_every_cpu"
WIDE = (
    "tests/cpu/test_ops_batch_lora.py::test_a_frozen_product_at_a_models_widths_does_not_depend_on_the_number_of_rows"
)
COMPANY = f"{SHARED}::test_company_and_cuts_change_no_bit"
# invariant, mutant, the test that must catch it
MUTANTS = (
    (1, "mean_of_means", PARITY),
    (1, "clip_without_epsilon", PARITY),
    (1, "mask_without_ordinal", PARITY),
    (1, "backward_mask_of_another_step", PARITY),
    (1, "rate_of_the_next_step", PARITY),
    (1, "attention_across_samples", PARITY),
    (1, "rslora_scales_by_r", PARITY),
    (1, "one_rate_for_a_and_b", PARITY),
    (1, "quantised_from_the_stored_dtype", f"{QUANTISED}::test_the_bits_are_those_of_transformers_with_bitsandbytes"),
    (1, "modules_in_the_same_rows", f"{QUANTISED}::{DENSE}"),
    (1, "weight_left_from_forward", f"{QUANTISED}::{DENSE}"),
    (1, "fp8_scales_left_out_of_dy", f"{FP8}::test_products_are_those_of_the_rounded_numbers"),
    (1, "merged_into_the_original_after_all", "tests/cpu/test_merge_quantised.py"),
    (2, "fp8_scale_of_all_rows", f"{FP8}::test_large_numbers_in_other_rows_change_no_bit"),
    (2, "gradient_over_the_whole_segment", COMPANY),
    (2, "mask_by_slot", COMPANY),
    (2, "mask_by_row", COMPANY),
    (2, "weight_of_another_adapter", COMPANY),
    (2, "clip_over_all_adapters", COMPANY),
    (2, "samples_out_of_order", COMPANY),
    (2, "rows_together_whatever_the_library", WIDE),
    (2, "short_products_unpadded", PADDED),
    (2, "odd_ranks_unpadded", PADDED),
    (2, "odd_ranks_unpadded_in_gradients", PADDED),
    (2, "sigmoid_of_torch", "tests/cpu/test_ops_elementwise.py"),
    (2, "kernel_sums_over_the_samples_place", KERNELS),
    (2, "kernel_mask_by_row", KERNELS),
    (2, "kernel_sum_begins_with_what_it_is_added_to", "tests/cpu/test_kernel_forms.py"),
    (2, "kernel_ignores_the_tables_slot", "tests/kernels/test_lora.py"),
    (
        2,
        "kernel_sum_goes_on_over_the_pieces",
        "tests/kernels/test_lora.py::test_pieces_with_programs_of_their_own_give_the_same_bits",
    ),
    (3, "messages_in_the_order_of_waiting", "tests/multiproc/test_nccl_link.py"),
    (3, "message_leaves_uncalled", "tests/multiproc/test_nccl_link.py"),
    (1, "float16_scale_stays_in_the_step", "tests/cpu/test_float16.py"),
    (3, "norm_of_the_first_stage_only", STAGES),
    (3, "decision_of_the_first_stage_only", STAGES),
    (3, "loss_forgotten_upstream", STAGES),
    (3, "dealt_adapter_forgets_its_stages", REPLICAS),
    (3, "replica_waits_for_its_stages", REPLICAS),
    (4, "moments_not_restored", CRASH),
    (4, "count_not_restored", CRASH),
    (4, "saved_before_the_step", CRASH),
    (4, "cursor_begins_anew", CRASH),
    (4, "snapshot_of_the_first_stage_only", CRASH),
    (4, "snapshot_is_no_copy", "tests/cpu/test_adapters_optimizer.py"),
    (4, "compute_copy_not_restored", CRASH),
    (4, "losses_between_lines_forgotten", CRASH),
    (4, "lines_behind_the_checkpoint_kept", CRASH),
    (4, "changed_keys_not_looked_at", f"{RESUME}::test_a_changed_key_is_named_and_needs_a_word"),
    (4, "base_known_by_its_headers", f"{RESUME}::test_a_checkpoint_of_another_base_model_is_refused"),
    (4, "evaluations_begin_anew", f"{EVALUATION}::test_a_crash_changes_no_bit"),
    (3, "best_kept_behind_the_next_step", f"{EVALUATION}::test_patience_ends_an_adapter_and_its_best_step_is_exported"),
    (1, "evaluated_with_dropout", f"{EVALUATION}::test_the_numbers_are_those_of_transformers"),
    (4, "version_in_its_place_at_once", VERSIONS),
    (4, "sums_not_looked_at", VERSIONS),
    (4, "edited_manifest_taken", VERSIONS),
    (
        4,
        "step_under_a_stop_is_taken",
        "tests/cpu/test_signals.py::test_the_first_signal_saves_and_ends_and_nothing_is_lost",
    ),
    (4, "restart_begins_anew", "tests/multiproc/test_restarts.py::test_torchrun_brings_a_killed_run_back_by_itself"),
    (4, "mixture_digest_without_shares", f"{MIXTURE}::test_weights_decide_the_epoch_and_a_mixture_resumes_bit_for_bit"),
    (4, "rest_of_a_source_is_always_the_same", "tests/cpu/test_data_sampler.py"),
    (4, "cache_key_without_max_samples", "tests/cpu/test_data_sources.py"),
    (1, "message_flag_not_looked_at", "tests/cpu/test_tasks_sft.py"),
    (5, "mask_of_each_draw", f"{SHARED}::test_recompute_changes_no_bit"),
    (5, "recompute_from_rounded_inputs", f"{SHARED}::test_recompute_changes_no_bit"),
    (5, "recompute_without_adapters", f"{SHARED}::test_recompute_changes_no_bit"),
    (6, "nan_step_applied", f"{SHARED}::test_a_neighbours_nan_changes_no_bit_and_the_neighbour_fails_by_name"),
    (6, "skipped_step_moves_weights", "tests/cpu/test_engine.py::test_a_skipped_step_moves_nothing"),
    (6, "cancelled_is_exported", f"{SHARED}::test_a_neighbour_that_stops_early_changes_no_bit"),
    (6, "nan_through_a_shared_product", "tests/cpu/test_ops_batch_lora.py"),
    (6, "retry_keeps_the_gradients", f"{POISON}::test_a_step_that_was_half_planned_is_repeated_from_its_first_sample"),
    (6, "steps_before_the_retry_count", POISON),
    (6, "poison_is_not_passed_on", POISON),
    (6, "full_memory_ends_all", f"{ISOLATION}::test_an_adapter_for_which_a_stage_has_no_room_is_parked"),
    (6, "unreadable_data_end_all", f"{ISOLATION}::test_data_that_become_unreadable"),
    (6, "unreadable_rows_are_trained", f"{ISOLATION}::test_data_that_become_unreadable"),
    (6, "parked_for_ever", f"{ISOLATION}::test_what_an_exception_has_parked_goes_on_from_its_last_good_step"),
    (7, "zero_b_written", EXPORT),
    (7, "alpha_of_the_scaling", EXPORT),
    (7, "pattern_matches_anywhere", EXPORT),
    (7, "missing_layer_written", EXPORT),
    (7, "keys_without_prefix", EXPORT),
    (7, "layers_forgotten", EXPORT),
    (7, "half_written_left", EXPORT),
)


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant[1] in names]
    unlisted = {path.stem for path in HERE.glob("*.patch")} ^ {name for _, name, _ in MUTANTS}
    if unlisted:
        print(f"patches and table differ: {', '.join(sorted(unlisted))}")
        return 1
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        sound = list(pool.map(_sound, sorted({test for _, _, test in chosen})))
        caught = list(pool.map(lambda mutant: _caught(*mutant), chosen)) if all(sound) else []
    print(f"{sum(caught)} of {len(chosen)} mutants caught")
    return 0 if len(caught) == len(chosen) and all(caught) else 1


def _sound(test: str) -> bool:
    """Whether the test passes on the code as it is; without that its failure would say nothing."""
    with tempfile.TemporaryDirectory() as folder:
        code, output = _run_test(_copy(Path(folder)), test)
    if code:
        print(f"NOT SOUND  {test} fails without a mutant\n{output}", flush=True)
    return code == 0


def _caught(invariant: int, name: str, test: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(Path(folder))
        applied = _run(["git", "apply", "-C1", str(HERE / f"{name}.patch")], copy)
        if applied.returncode:
            print(f"NO LONGER APPLIES  {name}: {applied.stderr.strip()}", flush=True)
            return False
        code, output = _run_test(copy, test)
    failed = [line.split()[1] for line in output.splitlines() if line.startswith("FAILED ")]
    if code != 1 or not failed:
        print(f"SURVIVES  {name} (invariant {invariant}): {test} gave exit code {code}\n{output[-2000:]}", flush=True)
        return False
    print(f"caught  {name} (invariant {invariant}) by {failed[0]}", flush=True)
    return True


def _copy(folder: Path) -> Path:
    for part in ("mlora", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def _run_test(folder: Path, test: str) -> tuple[int, str]:
    """pytest's exit code: 0 all passed, 1 a test failed, anything else says nothing about the mutant."""
    done = _run([sys.executable, "-m", "pytest", "-x", "--tb=line", "--show-capture=no", "-rf", test], folder)
    return done.returncode, done.stdout + done.stderr


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """From ``folder``, whose copy of the code comes before an installed one."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "GIT_CEILING_DIRECTORIES": "/"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
