"""Plans: which layer is where, how the split is found, and chunks whose gradients are computed by themselves."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import placement_paper
from megavlm.arch.dims import Dims, ScheduleName
from megavlm.arch.kinds import kind_in, layer_cost, layer_flops, model_parameters, step_flops
from megavlm.arch.layers import EMBEDDING, OUTPUT, layer_names, part_of, trained_below, trained_layers, trains_weights
from megavlm.arch.plan import even_cuts, make_plan, start_line, table
from megavlm.arch.scenario import scenario_of
from megavlm.arch.schedules import PipelineShape, held_at_peaks
from megavlm.arch.workload import Workload, image_workload, typical_workload, window_patches, window_squares
from megavlm.config.schema import Config, LanguageConfig, ModelConfig, PlacementConfig, ProjectorConfig, VisionConfig
from megavlm.errors import UserError
from megavlm.planner.layer_profiles import LayerProfiles
from megavlm.planner.partition import Partition, best_partition, simulate_partition
from megavlm.rules.defaults import resolve, resolve_model
from tests.support.flags import resolved

WORDS = ("--set", "model.language.vocab_size=256")
WORK = Workload(10, 0, 0, 10, 20, 0, 0, 20)  # of 10 patches and 20 tokens, attention aside


def largest(costs, cuts):
    bounds = (0, *cuts, len(costs))
    return max(sum(costs[a:b]) for a, b in pairwise(bounds))


def test_a_start_says_how_many_parameters_are_trained():
    whole, frozen, adapted = (
        resolved([*WORDS, *argv.split()]) for argv in ("", "--freeze vision projector", "--lora-rank 4")
    )
    model, language = whole.model, whole.model.language
    own = sum(model_parameters(name, model) for name in layer_names(model) if part_of(name) == "language")
    hidden, ffn, width = language.hidden_size, language.ffn_hidden_size, language.kv_channels
    queries, keys = language.num_attention_heads * width, language.num_query_groups * width
    linears = [(hidden, each) for each in (queries, keys, keys, queries, ffn, ffn, ffn)]
    lora = 4 * language.num_layers * sum(inputs + outputs for inputs, outputs in linears)
    assert "trained" not in start_line(whole, continued=None)
    assert f" parameters, of which {own:,} are trained;" in start_line(frozen, continued=None)
    assert f" parameters, of which {lora:,} are trained;" in start_line(adapted, continued=None)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.data())
def test_even_cuts_are_as_good_as_brute_force(costs, data):
    chunks = data.draw(st.integers(1, len(costs)))
    cuts = even_cuts(costs, chunks)
    assert list(cuts) == sorted(set(cuts))
    assert len(cuts) == chunks - 1
    assert all(0 < cut < len(costs) for cut in cuts)
    best = min(largest(costs, other) for other in combinations(range(1, len(costs)), chunks - 1))
    assert largest(costs, cuts) <= best + 1e-5 * (sum(costs) + 1)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_coordinates_are_one_to_one_and_tp_varies_fastest(tp, pp, vpp, dp):
    dims = Dims(tp=tp, pp=pp, vpp=vpp, dp=dp)
    seen = [dims.coordinates(rank) for rank in range(dims.world)]
    assert len(set(seen)) == dims.world
    assert [at.tp for at in seen[:tp]] == list(range(tp))
    assert [at.pp for at in seen] == sorted(at.pp for at in seen)
    assert sorted([chunk for rank in range(pp) for chunk in dims.chunks_of(rank)]) == list(range(dims.chunks))
    assert all(dims.owner_of(chunk) == rank for rank in range(pp) for chunk in dims.chunks_of(rank))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data())
def test_encoders_are_neighbours_of_one_replica(tp, pp, dp, data):
    dims = Dims(tp=tp, pp=pp, vpp=1, dp=dp)
    width = data.draw(st.sampled_from([n for n in range(1, tp * pp + 1) if tp * pp % n == 0]))
    encoders = dims.encoders(width)
    assert sorted(rank for encoder in encoders for rank in encoder) == list(range(dims.world))
    for encoder in encoders:
        found = [dims.coordinates(rank) for rank in encoder]
        assert len({at.dp for at in found}) == 1
        places = [at.tp + tp * at.pp for at in found]
        assert places == list(range(places[0], places[0] + width))
        assert places[0] % width == 0


def test_a_language_model_alone_has_the_layers_and_the_work_of_one():
    whole, alone = (resolved([*WORDS, "--set", f"model.vision.num_layers={layers}"]) for layers in (4, 0))
    flops = layer_flops(whole, typical_workload(whole))
    words = {name: each for name, each in flops.items() if part_of(name) == "language"}
    assert layer_flops(alone, typical_workload(alone)) == words
    assert make_plan(alone, Dims(pp=2, vpp=2)).chunks[0][0] == EMBEDDING
    assert typical_workload(alone).patches == typical_workload(alone).features == 0


def test_a_shared_encoder_is_part_of_the_plan():
    config = resolved([*WORDS, "--placement", "colocated", "--pp", "2", "--vision-tp", "2"])
    plan = make_plan(config, Dims(tp=1, pp=2, vpp=1, dp=1))
    assert plan.to_json()["vision_tp"] == 2
    assert "all / 2" in table(plan, config)
    whole = make_plan(resolved([*WORDS, "--placement", "colocated", "--pp", "2"]), Dims(tp=1, pp=2, vpp=1, dp=1))
    assert "vision_tp" not in whole.to_json()  # as checkpoints have it that know no other


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_chunks_are_the_layer_list_in_order(pp, vpp):
    config = resolved(WORDS)
    plan = make_plan(config, Dims(tp=1, pp=pp, vpp=vpp, dp=1))
    assert tuple(name for chunk in plan.chunks for name in chunk) == layer_names(config.model)
    assert len(plan.chunks) == pp * vpp
    assert all(plan.chunks)
    printed = table(plan, config)
    assert len(printed.splitlines()) == 2 + pp * vpp
    assert "language.layers" in printed


def test_cuts_by_hand_and_their_mistakes():
    def planned(*cuts):
        config = replace(Config(), placement=PlacementConfig(pipeline_cuts=cuts))
        return make_plan(config, Dims(tp=1, pp=3, vpp=1, dp=1))

    assert planned(2, 8).chunks[0] == ("patch_embed", "vision.layers.0")
    for cuts in [(2,), (8, 2), (2, 2), (0, 3), (3, 99)]:
        with pytest.raises(UserError, match="--pipeline-cuts"):
            planned(*cuts)


def test_layers_that_run_and_mergers_after_those_they_tap():
    names = layer_names(ModelConfig(vision=VisionConfig(num_layers=4, feature_layer=-2, deepstack_layers=(0, 2))))
    tower = "vision.layers.0 deepstack.0 vision.layers.1 vision.layers.2 deepstack.1 vision.norm"
    assert names[1:7] == tuple(tower.split())


def test_the_tower_does_not_depend_on_deepstack():
    model = ModelConfig(vision=VisionConfig(num_layers=3, deepstack_layers=(0,)))
    names = layer_names(model)
    trained = trained_layers(Config(model=replace(model, freeze=("vision",))))
    below = {name: trained_below(name, names[:place], trained) for place, name in enumerate(names)}
    assert [name for name in names if not below[name]] == [*names[: names.index("embedding")]]
    trained = trained_layers(Config(model=replace(model, freeze=("vision", "projector"))))
    assert not any(trained_below(name, names[: names.index(name)], trained) for name in names[:-8])


def test_windows_cost_what_they_hold():
    model = ModelConfig(vision=VisionConfig(patch_size=4, window_size=27, full_attention_layers=(1,)))
    assert window_patches(model) == 6
    assert window_patches(replace(model, projector=ProjectorConfig(pixel_shuffle=4))) == 4
    assert window_patches(ModelConfig()) == 0
    # 7 × 13 patches in windows of 6: rows 6 + 1, columns 6 + 6 + 1.
    assert window_squares((7, 13), 6) == sum((r * c) ** 2 for r in (6, 1) for c in (6, 6, 1))
    work = image_workload([(7, 13)], model)
    assert work.window_squares == window_squares((7, 13), 6)
    windowed, full = (layer_cost(f"vision.layers.{number}", model, work).forward_flops for number in (0, 1))
    assert full - windowed == 4.0 * (91**2 - window_squares((7, 13), 6)) * model.vision.hidden_size


def test_frames_of_a_chunk_attend_to_one_another_and_share_their_features():
    model = ModelConfig(projector=ProjectorConfig(pixel_shuffle=2))
    image, chunk = (image_workload([grid], model) for grid in ((4, 6), (4, 6, 3)))
    assert (chunk.patches, chunk.patch_squares, chunk.features) == (72, 72**2, image.features)


def test_a_frozen_tower_weighs_a_third():
    """Both stages of a step take as long: the frozen tower's has more layers."""
    argv = [
        *WORDS,
        *"--pp 2 --set model.vision.num_layers=12 model.vision.image_size=64 model.projector.pixel_shuffle=2".split(),
    ]
    dims = Dims(tp=1, pp=2, vpp=1, dp=1)
    for frozen in (), ("vision",), ("vision", "projector"):
        config = resolved([*argv, "--freeze", *frozen])
        flops = layer_flops(config, typical_workload(config))
        shares = [sum(flops[name] for name in chunk) / sum(flops.values()) for chunk in make_plan(config, dims).chunks]
        assert max(shares) < 0.55
    trained, frozen_tower = (make_plan(resolved([*argv, *more]), dims) for more in ([], ["--freeze", "vision"]))
    assert len(frozen_tower.chunks[0]) > len(trained.chunks[0])


def test_adapters_train_the_layers_that_have_them():
    argv = "--lora-rank 2 --freeze vision projector --pipeline-cuts 2 6 10 --pp 4 --lora-targets"
    config = resolved([*WORDS, *argv.split(), "language.layers.3.q_proj"])
    assert trained_layers(config) == {"language.layers.3"}
    plan = make_plan(config, Dims(tp=1, pp=4, vpp=1, dp=1))
    assert not plan.trained_before(3, trained_layers(config))  # layer 3 is in the last chunk
    names = layer_names(config.model)
    below = [name for place, name in enumerate(names) if trained_below(name, names[:place], trained_layers(config))]
    assert below == list(names[names.index("language.layers.3") + 1 :])
    adapters = ["--lora-rank", "2", "--lora-targets", "vision.layers.1", "language.layers.0.down_proj"]
    assert trained_layers(resolved([*WORDS, *adapters])) == {"vision.layers.1", "language.layers.0"}
    both = resolved([*WORDS, *adapters, "--freeze", "none"])
    assert trained_layers(both) == {"vision.layers.1", "projector", "language.layers.0"}
    assert not any(map(trains_weights, names, [config] * len(names)))
    assert [name for name in names if trains_weights(name, both)] == ["projector"]


def test_the_audio_encoder_is_frozen_and_adapted_apart_from_the_tower():
    heard = [*WORDS, *"--set model.audio.num_layers=2 model.audio_token=9 --freeze".split()]
    towers = [{"audio_embed", "audio.layers.0", "audio.layers.1"}, {"patch_embed", "vision.layers.0", "vision.norm"}]
    for frozen, kept in (("audio", "vision"), ("vision", "audio")):
        trained = trained_layers(resolved([*heard, frozen]))
        mine, other = towers if frozen == "audio" else reversed(towers)
        assert not mine & trained
        assert {*other, "projector", "audio.projector", "embedding"} <= trained
        adapters = resolved([*heard[:-1], *f"--lora-rank 2 --lora-targets {kept}".split()])
        assert {name.partition(".")[0] for name in trained_layers(adapters)} == {kept}


def test_flops_count_two_four_or_six_per_parameter_and_token():
    """Attention aside: frozen with nothing trained below 2, frozen above a trained part 4, trained above 6."""
    model = resolve_model(ModelConfig(language=LanguageConfig(vocab_size=100)))

    def forward(module):
        names = [name for name in layer_names(model) if part_of(name) == module]
        return sum(layer_cost(name, model, WORK).forward_flops for name in names)

    first = layer_cost("patch_embed", model, WORK).forward_flops  # its input needs no gradient
    everything = sum(map(forward, ("vision", "projector", "language")))
    assert step_flops(Config(model=model), WORK) == 3 * everything - first
    frozen_vision = Config(model=replace(model, freeze=("vision",)))
    projector = forward("projector")
    assert step_flops(frozen_vision, WORK) == forward("vision") + 2 * projector + 3 * forward("language")
    projector_only = Config(model=replace(model, freeze=("vision", "language")))
    assert step_flops(projector_only, WORK) == forward("vision") + 2 * projector + 2 * forward("language")


INF = float("inf")


def drawn(seed: int, layers: int) -> LayerProfiles:
    """Random layers, some of them frozen (no backward pass)."""
    random = np.random.default_rng(seed)

    def prefix(values: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(values)])

    forward = random.uniform(0.2, 2.0, layers)
    backward = forward * random.choice([0, 1, 2], layers)
    waits = backward == 2 * forward
    nothing = np.zeros(layers + 1)
    return LayerProfiles(
        scenario=scenario_of(resolve(Config()), Dims(1, 1, 1, 1), on_gpu=True),
        recompute="none",
        first=0,
        forward=prefix(forward),
        backward=prefix(backward),
        launch=nothing,
        launch_back=nothing,
        weight=prefix(np.where(waits, forward, 0)),
        weight_launch=nothing,
        waiting=prefix(np.where(waits, random.uniform(1, 4, layers), 0)),
        model_state=prefix(random.uniform(1, 3, layers)),
        saved=prefix(random.uniform(1, 4, layers)),
        transient=random.uniform(0, 2, layers),
        transfer=np.concatenate([[0.0], random.uniform(0, 0.3, layers - 1), [0.0]]),
    )


def fits(profiles: LayerProfiles, shape: PipelineShape, cuts: tuple[int, ...], cap: float) -> bool:
    """Whether every rank stays below `cap` bytes: those kept by all of its chunks, and the most transient ones."""
    every, bounds = held_at_peaks(shape), list(pairwise((0, *cuts, profiles.count)))
    for rank in range(shape.pp):
        kept = peak = 0.0
        for (a, b), held in zip(bounds[rank :: shape.pp], every[rank], strict=True):
            state, saved, waiting = (
                float(sums[b] - sums[a]) for sums in (profiles.model_state, profiles.saved, profiles.waiting)
            )
            kept += state + max(whole * saved + halves * waiting for whole, halves in held)
            peak = max(peak, float(profiles.transient[a:b].max()))
        if kept + peak > cap:
            return False
    return True


def brute_force(profiles: LayerProfiles, shape: PipelineShape, cap: float = INF) -> float:
    """Least simulated seconds over everything that fits; inf where nothing does."""
    every = combinations(range(1, profiles.count), shape.chunks - 1)
    fitting = (cuts for cuts in every if fits(profiles, shape, cuts, cap))
    return min((simulate_partition(profiles, shape, cuts).seconds for cuts in fitting), default=INF)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (5, PipelineShape("1f1b", 1, 1, 3)),
        (7, PipelineShape("1f1b", 2, 1, 2)),
        (7, PipelineShape("1f1b", 3, 1, 5)),
        (6, PipelineShape("1f1b", 4, 1, 4)),
        (6, PipelineShape("interleaved", 2, 2, 4)),
        (7, PipelineShape("zb-h1", 2, 1, 3)),
        (7, PipelineShape("zb-h1", 3, 1, 5)),
        (6, PipelineShape("zb-h1", 4, 1, 2)),
        (7, PipelineShape("gpipe", 3, 1, 4)),
    ],
)
@pytest.mark.parametrize("share", [None, 0.8, 0.6])
def test_finds_what_brute_force_finds(seed: int, layers: int, shape: PipelineShape, share: float | None) -> None:
    profiles = drawn(seed, layers)
    everything = float(profiles.model_state[-1] + shape.pp * profiles.saved[-1])
    cap = INF if share is None else share * everything
    expected = brute_force(profiles, shape, cap)
    found = best_partition(profiles, shape, caps=(cap,) * shape.pp, simulations=10**6)
    if expected == INF:
        assert found == INF
        return
    assert isinstance(found, Partition)
    assert found.exact
    assert found.seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_on_other_devices_get_other_layers(seed: int, schedule: ScheduleName) -> None:
    """Ranks 1 and 2 are three times as fast, and rank 1 has hardly any memory."""
    profiles, shape = drawn(seed, 7), PipelineShape(schedule, 3, 1, 5)
    fast = replace(profiles, **{name: getattr(profiles, name) / 3 for name in ("forward", "backward", "weight")})
    mixed = replace(profiles, stages=(profiles, fast, fast))
    assert brute_force(mixed, shape) < brute_force(profiles, shape)
    found = best_partition(mixed, shape, simulations=10**6)
    assert isinstance(found, Partition)
    assert found.exact
    assert found.seconds == pytest.approx(brute_force(mixed, shape), rel=1e-12)
    assert best_partition(mixed, shape, caps=(1e6, 1e-6, 1e6)) == INF


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "shape", [PipelineShape("1f1b", 5, 1, 6), PipelineShape("interleaved", 3, 2, 6), PipelineShape("zb-h1", 5, 1, 7)]
)
def test_what_a_short_search_finds_is_a_local_optimum(seed: int, shape: PipelineShape) -> None:
    profiles = drawn(seed, 24)
    cap = 0.5 * float(profiles.model_state[-1] + shape.pp * profiles.saved[-1])
    found = best_partition(profiles, shape, caps=(cap,) * shape.pp, simulations=2)
    assert isinstance(found, Partition)
    assert not found.exact
    assert found.bound <= found.seconds
    bounds = (0, *found.cuts, profiles.count)
    for place, cut in enumerate(found.cuts):
        for step in (-3, -2, -1, 1, 2, 3):
            moved = (*found.cuts[:place], cut + step, *found.cuts[place + 1 :])
            if bounds[place] < cut + step < bounds[place + 2] and fits(profiles, shape, moved, cap):
                assert simulate_partition(profiles, shape, moved).seconds >= found.seconds * (1 - 1e-9)
    assert fits(profiles, shape, found.cuts, cap)
    assert simulate_partition(profiles, shape, found.cuts).seconds == pytest.approx(found.seconds)


DOCUMENT = Path(__file__).parents[3] / "docs" / "reports" / "predictions.md"
GAIN = re.compile(r"\d\.\d\d")


def test_the_documented_table_is_the_simulated_one() -> None:
    documented = DOCUMENT.read_text().splitlines()
    header, _, *rows = placement_paper.table(32)
    start = documented.index(header) + 2
    for ours, theirs in zip(rows, documented[start:], strict=False):
        assert GAIN.sub("", ours) == GAIN.sub("", theirs)
        assert [float(gain) for gain in GAIN.findall(theirs)] == pytest.approx(
            [float(gain) for gain in GAIN.findall(ours)], abs=0.02
        )


SIZES = "--set model.language.vocab_size=1000"


def test_flops_have_one_forward_pass_more_and_no_logits() -> None:
    plain, cached = (resolved(f"{SIZES} {flags}".split()) for flags in ("", "--objective contrastive"))
    work = typical_workload(plain)
    ahead = sum(layer_cost(name, cached.model, work).forward_flops for name in layer_names(plain.model))
    logits = layer_flops(plain, work)[OUTPUT]
    assert step_flops(cached, work) == pytest.approx(step_flops(plain, work) - logits + ahead)
    assert layer_flops(cached, work)[OUTPUT] == 0


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--objective contrastive", 0),
        ("--objective contrastive --set model.objective.learn_temperature=true", 1),
        ("--objective sigmoid", 2),
        ("--objective sigmoid --set model.objective.learn_temperature=false", 0),
    ],
)
def test_the_output_layer_has_the_scalars_of_the_loss_alone(flags: str, count: int) -> None:
    model = resolved(f"{SIZES} {flags}".split()).model
    assert kind_in(model, OUTPUT).parameters(model, 2) == count
