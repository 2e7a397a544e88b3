"""Every acceptance rule leaves the target's distribution as it is, whatever the drafter and the filters.

A target and its drafters are tables of five tokens: logits that depend on the token before. 40,000 seeds, 300,000 in the long runs, go
side by side until each has three tokens, whose joint distribution is compared with the enumerated one.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions import row_probabilities
from scipy import stats

from jaxspec.decode import accept
from jaxspec.drafters.base import Drafts
from jaxspec.sampling.choice import Sampling, choose
from jaxspec.sampling.filters import Filters

pytestmark = pytest.mark.usefixtures("unoptimised")
TOKENS, LENGTH = 5, 3
SEEDS, MANY = 40_000, 300_000  # the second in the long runs
ENOUGH = 150_000  # to find a fault: 60,000 are too few for one of those below
RULES = ("coupled", "standard", "block")
RNG = np.random.default_rng(7)
TARGET = RNG.normal(0, 1.5, (TOKENS, TOKENS)).astype(np.float32)
GOOD = (TARGET + RNG.normal(0, 0.6, TARGET.shape)).astype(np.float32)
ADVERSARIAL = -TARGET  # prefers what the target avoids
FEW = np.array([4, 0, 2])  # the candidates of a drafter that knows no other tokens
START = 1  # the token before the first
NONE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# A top_k of all five tokens leaves the other filters alone, and lets them share a program.
FILTERS = [
    {"top_k": 3},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 5, "min_p": 0.15},
    {"top_k": 5, "temperature": 0.6},
    {"top_k": 4, "top_p": 0.9, "min_p": 0.05, "temperature": 1.4},
]


def table_of(logits, **filters):
    return np.array([row_probabilities(row, **{**NONE, **filters}) for row in logits])


def enumerated(table):
    """The probability of each three tokens in turn: [125]."""
    texts = itertools.product(range(TOKENS), repeat=LENGTH)
    return np.array([np.prod([table[before, token] for before, token in zip((START, *text), text, strict=False)]) for text in texts])


@functools.cache
def program(rule, k, kind, scope, fault=None):
    """Jitted: (target, drafter, filters) -> texts [seeds, 3] and the accepted drafts of the first round [seeds].

    kind: "full" for a drafter over all tokens, "few" over FEW, "lookup" for guesses without a distribution.
    """
    keep, seeds = accept.Rule(rule), max(SEEDS, ENOUGH) if fault else SEEDS

    def run(target, drafter, temperature, top_k, top_p, min_p):
        seed = jnp.stack([jnp.arange(seeds, dtype=jnp.uint32), jnp.zeros(seeds, jnp.uint32)], axis=1)
        each = [jnp.full(seeds, x) for x in (temperature, top_k, top_p, min_p)]
        sampling = Sampling(seed, each[0], None if scope == "plain" else Filters(*each[1:], scope=scope))
        slot = jnp.arange(seeds)[:, None]

        def body(n, carry):
            tokens, length, first = carry
            rounds = jnp.full(seeds, 0 if fault == "one round's noise" else n, jnp.int32)
            drafts = drafted(drafter, tokens[slot[:, 0], length - 1], length, keep.drafting(sampling, rounds))
            block = jnp.concatenate([tokens[slot[:, 0], length - 1][:, None], drafts.tokens], axis=1)
            positions = length[:, None] + jnp.arange(k + 1, dtype=jnp.int32)[None, :]
            new, accepted = keep(drafts, target[block], positions, sampling, rounds)
            row = jnp.arange(k + 1, dtype=jnp.int32)[None, :]
            at = jnp.where((row <= accepted[:, None]) & (length[:, None] + row < tokens.shape[1]), length[:, None] + row, tokens.shape[1])
            tokens = tokens.at[slot, at].set(new, mode="drop")
            length = jnp.minimum(length + accepted + 1, 1 + LENGTH)
            return tokens, length, jnp.where(n == 0, accepted, first)

        begun = jnp.full((seeds, 1 + LENGTH + k), START, jnp.int32), jnp.ones(seeds, jnp.int32), jnp.zeros(seeds, jnp.int32)
        tokens, _, first = jax.lax.fori_loop(0, LENGTH, body, begun)
        return tokens[:, 1 : 1 + LENGTH], first

    def drafted(drafter, anchor, length, sampling):
        steps, token = [], anchor[:, None]
        for i in range(k):
            logits, ids = drafter[token], None
            if kind == "few":
                ids = jnp.broadcast_to(jnp.asarray(FEW, jnp.int32)[None, None, :], (seeds, 1, len(FEW)))
                logits = jnp.take_along_axis(logits, ids, axis=-1)
            token = choose(logits, length[:, None] + i, sampling, ids)
            if kind == "lookup":
                token, logits, ids = jnp.argmax(logits, axis=-1).astype(jnp.int32), None, None
            steps.append((token, logits, ids))
        return Drafts.joined(steps, seeds)

    return jax.jit(run)


@functools.cache
def texts(rule, k=3, drafter="GOOD", kind="full", fault=None, **filters):
    """(the text of each seed as a number [SEEDS], accepted drafts of its first round [SEEDS])."""
    values = {**NONE, **filters}
    arguments = (np.float32(values["temperature"]), np.int32(values["top_k"]), np.float32(values["top_p"]), np.float32(values["min_p"]))
    run = program(rule, k, kind, "top" if values["top_k"] else "plain", fault)
    tokens, accepted = map(np.asarray, run(TARGET, globals()[drafter], *arguments))
    return tokens @ np.array([TOKENS**2, TOKENS, 1]), accepted


@pytest.fixture(autouse=True, scope="module", params=[SEEDS, pytest.param(MANY, marks=pytest.mark.slow)])
def seeds(request):
    """How many seeds every test runs."""
    global SEEDS
    SEEDS = request.param
    program.cache_clear()
    texts.cache_clear()


def counted(found, expected):
    """p-value of the chi-square test; cells that expect under 5 are counted as one, and none may hold what cannot be."""
    observed, expected = np.bincount(found, minlength=len(expected)).astype(np.float64), expected * len(found)
    assert not observed[expected == 0].any()
    rare = expected < 5
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    return stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue


def share(accepted, expected):
    """How far a mean lies from what is expected, in standard errors."""
    return (accepted.mean() - expected) / (accepted.std() / len(accepted) ** 0.5)


@pytest.mark.parametrize(("drafter", "kind"), [("GOOD", "full"), ("ADVERSARIAL", "full"), ("GOOD", "few"), ("GOOD", "lookup")])
@pytest.mark.parametrize("rule", RULES)
def test_the_joint_distribution_is_the_targets_whatever_is_drafted(rule, drafter, kind):
    found, accepted = texts(rule, 3, drafter, kind)
    assert counted(found, enumerated(table_of(TARGET))) > 1e-3
    assert 0.02 < accepted.mean() < 2.5  # and drafts of both kinds occurred
    # The test has teeth: a target a little warmer would not pass.
    assert counted(found, enumerated(table_of(TARGET, temperature=1.05))) < 1e-9


@pytest.mark.parametrize("rule", RULES)
def test_without_drafts_the_distribution_is_the_targets(rule):
    found, accepted = texts(rule, 0)
    assert counted(found, enumerated(table_of(TARGET))) > 1e-3
    assert not accepted.any()


@pytest.mark.parametrize(
    "filters", [f if f in (FILTERS[0], FILTERS[-1]) else pytest.param(f, marks=pytest.mark.slow) for f in FILTERS], ids=str
)
@pytest.mark.parametrize("rule", RULES)
def test_filters_hold_at_every_verified_position(rule, filters):
    expected = enumerated(table_of(TARGET, **filters))
    found, accepted = texts(rule, 2, **filters)
    assert counted(found, expected) > 1e-3
    assert 0.5 < accepted.mean() < 1.9
    assert counted(found, enumerated(table_of(TARGET)) + 1e-12) < 1e-9  # they do filter


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rows_have_one_text(rule):
    found, _ = texts(rule, temperature=0)
    assert enumerated(table_of(TARGET, temperature=0))[found].all()


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        *(pytest.param(rule, "the draft's noise", marks=pytest.mark.slow) for rule in ("standard", "block")),
        pytest.param("standard", "one round's noise", marks=pytest.mark.slow),
        ("block", "nothing taken away"),
    ],
)
def test_wrong_rules_are_found(rule, fault, monkeypatch):
    """What follows a rejection drawn with the draft's noise; noise of a rejected tail used again; p in place of what p has left."""
    if fault == "the draft's noise":
        monkeypatch.setattr(accept, "RESIDUAL", accept.DRAFT)
    if fault == "nothing taken away":
        monkeypatch.setattr(accept, "rest", lambda p, q, accepted, weight: p.row(accepted))
    assert counted(texts(rule, 3, fault=fault)[0], enumerated(table_of(TARGET))) < 1e-9


@pytest.mark.parametrize("filters", [{}, FILTERS[-1]], ids=str)
def test_how_often_the_first_draft_is_kept(filters):
    p, q = table_of(TARGET, **filters)[START], table_of(GOOD, **filters)[START]
    if not filters:
        assert abs(share(texts("standard")[1] > 0, np.minimum(p, q).sum())) < 4
    # Coupled: 1 / sum_j max(p_j / p_i, q_j / q_i), summed over the tokens i that both may choose.
    both = [i for i in range(TOKENS) if p[i] and q[i]]
    expected = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in both)
    assert abs(share(texts("coupled", 2 if filters else 3, **filters)[1] > 0, expected)) < 4
    assert expected < np.minimum(p, q).sum()


def test_a_block_keeps_as_many_drafts_as_the_paper_says_and_no_fewer_than_standard():
    """Of prefix x the share w(x) is kept: w_i = min(w_(i - 1) p / q, 1) for the block, the product of min(p / q, 1) for standard."""
    p, q = table_of(TARGET), table_of(GOOD)
    expected = {"standard": 0.0, "block": 0.0}
    for count in (1, 2, 3):
        for text in itertools.product(range(TOKENS), repeat=count):
            drawn, kept = 1.0, dict.fromkeys(expected, 1.0)
            for before, token in zip((START, *text), text, strict=False):
                ratio = p[before, token] / q[before, token]
                drawn *= q[before, token]
                kept = {"standard": kept["standard"] * min(ratio, 1), "block": min(kept["block"] * ratio, 1)}
            expected = {rule: expected[rule] + drawn * kept[rule] for rule in expected}
    for rule, mean in expected.items():
        assert abs(share(texts(rule)[1], mean)) < 4, rule
    assert expected["block"] > expected["standard"] + 0.01


def test_coupled_gives_each_seed_its_text_whatever_is_drafted():
    alone = texts("coupled", 0)[0]
    for drafter, kind in (("GOOD", "full"), ("ADVERSARIAL", "full"), ("GOOD", "few"), ("GOOD", "lookup")):
        assert np.array_equal(texts("coupled", 3, drafter, kind)[0], alone)
    assert (texts("standard")[0] != alone).mean() > 0.2  # what the other rules give up
