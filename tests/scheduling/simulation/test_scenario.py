"""Scenario files: the examples are right, and a wrong key is refused with its file, line and name."""

from pathlib import Path

import pytest

from scheduling.simulation.scenario import ScenarioError, load_scenario

EXAMPLES = Path(__file__).parents[3] / "docs" / "scenarios"

RIGHT = """seed = 3

[models.m]
context_tokens = 1000

[gpus.g]
usd_per_hour = 2

[regions.east]
[regions.west]
peak_shift_h = 3

[latency_ms]
east = { west = 60 }

[[profiles]]
model = "m"
gpu = "g"
prefill = { a_s = 0.01, b_s_per_token = 1e-4 }
decode = { a_s = 0.01 }

[[fleet]]
model = "m"
regions = ["east", "west"]
gpu = "g"
instances = 2
kv_tokens = 16000

[classes.iw]
ttft_ms = 500

[scaling]
strategy = "reactive"
min_instances = 1
max_instances = 4

[demand]
duration_h = 0.1

[[clients]]
tenant = "t"
model = "m"
slo_class = "iw"
requests_per_s = 1
prompt = { median = 100, p95 = 300, maximum = 800 }
output = { median = 20, p95 = 60, maximum = 200 }
"""


def scenario(folder: Path, text: str) -> Path:
    path = folder / "scenario.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_are_right(path: Path) -> None:
    assert load_scenario(path).title


def test_a_right_scenario(tmp_path: Path) -> None:
    loaded = load_scenario(scenario(tmp_path, RIGHT))
    assert loaded.seed == 3
    assert loaded.fleet[0].max_num_seqs == 256
    assert loaded.scaling is not None
    assert loaded.scaling.max_instances == 4
    assert loaded.latency_ms == {"east": {"west": 60}}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed = 3", "seed = -3", r"line 1, seed: should be greater than or equal to 0, not -3"),
        ("seed = 3", "sede = 3", r"line 1, sede: is not a key here; there is title, seed, sample_s"),
        ("context_tokens = 1000", "context_tokens = '1000'", r"line 4, models.m.context_tokens: .*integer, not '1000'"),
        ("usd_per_hour = 2", "usd_per_hour = nan", r"line 7, gpus.g.usd_per_hour: should be .*finite.*not nan"),
        ("instances = 2", "", r"line 22, fleet\[0\].instances: is missing"),
        ("instances = 2", "instances = 0", r"line 22, fleet\[0\]: instances, asleep, spot and empty are all 0"),
        ("kv_tokens = 16000", "kv_tokens = 0", r"line 27, fleet\[0\].kv_tokens: .*greater than or equal to 1, not 0"),
        ("a_s = 0.01, b_s_per", "a_s = inf, b_s_per", r"line 19, profiles\[0\].prefill.a_s: .*finite"),
        ("max_instances = 4", "max_instances = 0", r"line 32, scaling: min_instances \(1\) is above max"),
        ("maximum = 800", "maximum = 800, minimum = 900", r"line 45, clients\[0\].prompt: minimum \(900\) is above"),
        ("requests_per_s = 1", "requests_per_s = 0", r"line 44, clients\[0\].requests_per_s: .*greater than 0, not 0"),
        ("p95 = 60", "p95 = 6", r"line 46, clients\[0\].output: median \(20.*\) is above p95"),
        ('slo_class = "iw"', 'slo_class = "gold"', r"line 43, clients\[0\].slo_class: there is no class 'gold'; there"),
        (
            'regions = ["east", "west"]',
            'regions = ["north"]',
            r"line 24, fleet\[0\].regions: there is no region 'north'",
        ),
        ('gpu = "g"\ninstances', 'gpu = "h"\ninstances', r"line 25, fleet\[0\].gpu: there is no GPU 'h'; there is g"),
        ('gpu = "g"\ninstances', 'gpu = "g"\ntensor_parallel = 2\ninstances', r"no profile of m on 2 x g"),
        ("east = { west", "south = { west", r"line 14, latency_ms.south: there is no region 'south'"),
        ("[demand]\nduration_h = 0.1", "", r"demand: duration_h is missing"),
        (
            "[classes.iw]",
            "[policies]\nrouting = 'luck'\n[classes.iw]",
            r"policies.routing: must be one of .*not 'luck'",
        ),
        (
            "[classes.iw]",
            "[trace]\nfile='x'\nformat='azure'\n[classes.iw]",
            r"trace: give \[trace\] or \[\[clients\]\]",
        ),
        (
            "context_tokens = 1000",
            "context_tokens = 1000\nbundle = 'Orca'",
            r"line 5, models.m.bundle: must be one of sageserve-lt-ua, .*, pilothouse, not 'Orca'",
        ),
        (
            "[classes.iw]",
            "[policies]\nbundle = 'x'\n[classes.iw]",
            r"policies.bundle: must be one of sageserve-lt-ua",
        ),
        ("decode = { a_s = 0.01 }", "", r"line 16, profiles\[0\].decode: is missing: m generates"),
        ("output = { median", "# { median", r"line 40, clients\[0\].output: is missing: m generates"),
        ("tokens = 1000", "tokens = 1000\ntask = 'embed'", r"clients\[0\].output: is of .* the task of m is embed"),
        ("tokens = 1000", "tokens = 1000\ntask = 'draw'", r"line 5, models.m.task: .*'embed'.* not 'draw'"),
        ('strategy = "reactive"\n', "", r"scaling.strategy: is missing: m in east has no bundle"),
        ("[classes.iw]", "[classes.iw", r"line 29: is not TOML"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in RIGHT
    with pytest.raises(ScenarioError, match=message) as raised:
        load_scenario(scenario(tmp_path, RIGHT.replace(old, new, 1)))
    assert str(raised.value).startswith(str(tmp_path / "scenario.toml"))


def test_a_model_without_instances_is_refused(tmp_path: Path) -> None:
    text = RIGHT.replace("[gpus.g]", "[models.other]\ncontext_tokens = 5\n[gpus.g]")
    text = text.replace('tenant = "t"\nmodel = "m"', 'tenant = "t"\nmodel = "other"')
    with pytest.raises(ScenarioError, match=r"clients\[0\].model: no instance of the fleet serves other"):
        load_scenario(scenario(tmp_path, text))


def test_the_second_element_of_an_array_has_its_own_line(tmp_path: Path) -> None:
    text = RIGHT + '\n[[clients]]\ntenant = "u"\nmodel = "m"\nslo_class = "iw"\nrequests_per_s = "fast"\n'
    with pytest.raises(ScenarioError, match=r"line 52, clients\[1\].requests_per_s: should be a valid number"):
        load_scenario(scenario(tmp_path, text))


def test_no_demand_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"there is no demand"):
        load_scenario(scenario(tmp_path, RIGHT[: RIGHT.index("[[clients]]")]))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"nowhere.toml: No such file"):
        load_scenario(tmp_path / "nowhere.toml")
