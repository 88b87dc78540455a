import json
from xml.etree import ElementTree

from mlora.pipeline.schedule import Planner, Stream, chrome_trace, in_flight, rows, simulate, svg
from tests.pure.schedule_helpers import plans, rows_cost, stream

NS = "{http://www.w3.org/2000/svg}"


def timeline():
    steps = [plans(0, [[60], [60]], evaluate_after=[0]), plans(1, [[100], [20]])]
    positions = stream(Planner(160, in_flight(2)), steps)
    return simulate(rows(positions, in_flight(2)), Stream(positions, 2), rows_cost(send=2))


def test_svg_shows_every_action_adapter_and_stage():
    times = timeline()
    root = ElementTree.fromstring(svg(times, {1: "chat <b>"}))
    titles = [element.text.split(":")[0] for element in root.iter(f"{NS}title")]
    assert sorted(titles) == sorted(str(x.action) for x in times if x.action.kind[:4] not in ("SEND", "RECV"))
    texts = {element.text for element in root.iter(f"{NS}text")}
    assert {"stage 0", "stage 1", "adapter 0", "chat <b>"} <= texts
    assert any(text.startswith("2 stages, ") for text in texts)


def test_svg_boxes_lie_in_their_lane_and_are_as_long_as_the_action():
    times = timeline()
    root = ElementTree.fromstring(svg(times))
    boxes = {group.find(f"{NS}title").text.split(":")[0]: group.findall(f"{NS}rect") for group in root.iter(f"{NS}g")}
    assert all(boxes.values())
    width = {name: float(rects[0].get("width")) for name, rects in boxes.items()}
    assert abs(width["0B0"] - 2 * width["0F0"]) < 0.3
    y = {name: float(rects[0].get("y")) for name, rects in boxes.items()}
    assert len({y[name] for name in y if name.startswith("0")}) == 1
    assert y["1F0"] > y["0F0"]


def test_svg_has_one_colour_per_adapter_and_stripes_a_shared_microbatch():
    steps = [plans(0, [[60]]), plans(1, [[30]])]
    positions = stream(Planner(160), steps)
    times = simulate(rows(positions, (1,)), Stream(positions, 1), rows_cost())
    root = ElementTree.fromstring(svg(times))
    forward, backward = (group.findall(f"{NS}rect") for group in root.iter(f"{NS}g"))
    assert len({rect.get("fill") for rect in [*forward, *backward]}) == 4
    heights = [float(rect.get("height")) for rect in forward]
    assert abs(heights[0] - 2 * heights[1]) < 0.2


def test_chrome_trace_has_a_thread_per_stage_and_microseconds():
    times = timeline()
    events = json.loads(chrome_trace(times))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "stage 0", 1: "stage 1"}
    shown = {event["name"]: event for event in events if event["ph"] == "X"}
    assert shown.keys() == {str(timed.action) for timed in times}
    for action, start, stop in times:
        event = shown[str(action)]
        assert (event["tid"], event["ts"], event["dur"]) == (action.stage, start * 1e6, (stop - start) * 1e6)
    assert shown["0SEND_F0"]["cat"] == "communication"
    assert shown["0F0"]["cat"] == "compute"
    assert "0.0" in shown["0F0"]["args"]["steps"]
