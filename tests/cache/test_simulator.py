"""The simulator: cases that can be worked out by hand, and things that must hold for any profile."""

import dataclasses

import pytest

from umbra.cache.simulator import PROFILES, Profile, Simulator, TierProfile, fitted, resume_seconds, summarise
from umbra.cache.traces import TracedRequest, conversations

BLOCK = 100
PLAIN = Profile(
    "plain",
    (
        TierProfile("device", 1000.0, 0.0, 1e12),
        TierProfile("memory", 5000.0, 0.5, 1000.0),
        TierProfile("disk", 1e9, 1.0, 500.0, 0.25),
    ),
    kv_bytes=1.0,
    compute=10.0,
    floor=0.1,
    chunk=100,
    slots=2,
)


def test_one_request_by_hand():
    # 250 tokens at 10 a second, then 4 more answers at the floor.
    (outcome,) = Simulator(PLAIN, BLOCK).run([TracedRequest(3.0, 250, 5, (0, 1, 2))])
    assert outcome.ttft == pytest.approx(25.0) and outcome.finished == pytest.approx(28.0 + 4 * 0.1)
    assert outcome.cached == {} and outcome.load == 0


def test_resume_by_hand():
    assert resume_seconds(PLAIN, 500, 50, None, BLOCK) == pytest.approx(55.0)
    assert resume_seconds(PLAIN, 500, 50, 0, BLOCK) == pytest.approx(5.0)
    assert resume_seconds(PLAIN, 500, 50, 1, BLOCK) == pytest.approx(0.5 + 500 / 1000 + 5.0)
    assert resume_seconds(PLAIN, 500, 50, 2, BLOCK) == pytest.approx(1.0 + 5 * 0.25 + 500 / 500 + 5.0)
    # What is slower to load is computed.
    slow = dataclasses.replace(PLAIN, tiers=(PLAIN.tiers[0], TierProfile("memory", 5000.0, 0.0, 1.0)))
    assert resume_seconds(slow, 500, 50, 1, BLOCK) == pytest.approx(55.0)


def test_tiers_queue_and_slots_fill():
    simulator = Simulator(PLAIN, BLOCK)
    chains = [tuple(range(10 * i, 10 * i + 5)) for i in range(3)]
    for chain in chains:
        simulator.warm(chain[:4], 2)
    outcomes = simulator.run([TracedRequest(0.0, 450, 1, chain) for chain in chains])
    busy = 4 * 0.25 + 400 / 500
    assert [outcome.load for outcome in outcomes] == pytest.approx([busy + 1.0, 2 * busy + 1.0, 3 * busy + 1.0])
    assert all(outcome.cached == {"disk": 400} for outcome in outcomes)
    assert outcomes[2].ttft >= outcomes[1].ttft > outcomes[0].ttft


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_serves_everybody(name):
    requests = conversations(
        12, turns=3, system_blocks=3, turn_blocks=2, block_tokens=128, output_tokens=20, pause=2, interval=0.5
    )
    profile = PROFILES[name]
    assert not profile.measured
    outcomes = Simulator(profile, 128).run(requests)
    summary = summarise(requests, outcomes)
    assert summary.requests == 36 and 0 < summary.ttft_p50 <= summary.ttft_p95
    assert all(o.finished > o.arrived and o.ttft > 0 for o in outcomes)
    assert summary.cached["device"] > 0.3, "what the device has costs nothing"
    without = dataclasses.replace(profile, tiers=(dataclasses.replace(profile.tiers[0], capacity=1.0),))
    slower = summarise(requests, Simulator(without, 128).run(requests))
    assert slower.ttft_p50 >= summary.ttft_p50 and slower.tokens_per_second <= summary.tokens_per_second * 1.001
    times = [resume_seconds(profile, 4096, 64, tier) for tier in range(len(profile.tiers))]
    assert times == sorted(times) and times[-1] <= resume_seconds(profile, 4096, 64, None) * 1.0001


def test_a_fitted_profile_reproduces_what_it_was_fitted_to():
    truth = dataclasses.replace(PLAIN, compute=800.0, attention=1e-7, floor=0.001)
    shapes = [(0, 128), (0, 512), (0, 2048), (4096, 512), (8192, 1024)]
    samples = [(before, tokens, truth.prefill_seconds(tokens, before)) for before, tokens in shapes]
    profile = fitted("here", samples, step=0.001, kv_bytes=1.0, tiers=PLAIN.tiers, chunk=100)
    assert profile.measured and profile.compute == pytest.approx(800, rel=0.02)
    for before, tokens in [(0, 1000), (6000, 700)]:
        assert profile.prefill_seconds(tokens, before) == pytest.approx(truth.prefill_seconds(tokens, before), rel=0.05)
    with pytest.raises(ValueError, match="measure them at more lengths"):
        fitted("here", [(0, 100, 0.001), (10_000, 100, 100.0)], step=1, kv_bytes=1, tiers=PLAIN.tiers)
