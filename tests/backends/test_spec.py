"""UpdateSpec: validation, serialisation, operands, the printed equation, and the spectrum."""

import re
from collections import defaultdict

import pytest
import torch

from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.conformance.pairwise import AXES, every_spec, pairs_of, pairwise, pairwise_cases
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.measure.shapes import SHAPES
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.papers import papers
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.backends.update.spec import UpdateSpec

REFUSED = [
    ({"transition": "additive", "reparam": "efla"}, "reparam='efla' needs the delta rule"),
    ({"transition": "dplr", "reparam": "longhorn"}, "reparam='longhorn' needs the delta rule"),
    ({"transition": "additive", "erase_key": "own"}, "erase_key='own' needs the delta rule"),
    ({"transition": "dplr", "erase_key": "own"}, "erases with its operands a and b"),
    ({"transition": "additive", "beta": "separate"}, "has no erase term, and its write strength is beta='head'"),
    ({"transition": "dplr", "beta": "separate"}, "beta='separate' needs the delta rule; transition='dplr' erases with"),
    ({"reparam": "efla", "beta": "separate"}, "beta='separate' with reparam='efla': the size of a step is one beta"),
    ({"reparam": "longhorn", "beta": "separate"}, "beta='separate' with reparam='longhorn'"),
    ({"transition": "additive", "negative_eigenvalues": "both"}, "has no erase term"),
    ({"transition": "dplr", "negative_eigenvalues": "erase"}, "negative_eigenvalues='erase' needs the delta rule"),
    ({"transition": "additive", "erase_from": "previous"}, "erase_from='previous' needs an erase term"),
    ({"transition": "dplr", "erase_from": "decayed"}, "always reads the previous state"),
    ({"transition": "dplr", "householders": 2}, "householders=2 needs transition 'delta' or 'additive'"),
    ({"reparam": "efla", "negative_eigenvalues": "both"}, "positive by construction"),
    ({"reparam": "longhorn", "negative_eigenvalues": "erase"}, "positive by construction"),
    ({"reparam": "efla", "erase_key": "own"}, "the step is exact only for e = k"),
    ({"reparam": "longhorn", "erase_key": "own"}, "the step is exact only for e = k"),
    ({"householders": 0}, "householders must be at least 1, got 0"),
    ({"householders": 1.5}, "householders must be an integer, got 1.5"),
    ({"decay": "chanel"}, "'none', 'fixed', 'head', 'channel' or 'rate'"),
    ({"beta": None}, "'none', 'head', 'separate' or 'channel'"),
    ({"scale": float("nan")}, "finite number"),
    ({"scale": float("inf")}, "finite number"),
    ({"version": 2}, "version must be 1, got 2"),
    ({"decays": "head"}, "decays: unknown field; did you mean 'decay'?"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_invalid_combination_is_refused_with_the_reason(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        UpdateSpec(**fields)


def test_spec_is_frozen():
    spec = UpdateSpec()
    with pytest.raises(ConfigError, match=r"UpdateSpec\.decay cannot be set: a config does not change"):
        spec.decay = "head"
    assert spec == UpdateSpec()


def test_the_repr_shows_the_fields_that_differ_from_their_defaults():
    assert repr(UpdateSpec()) == "UpdateSpec()"
    assert repr(UpdateSpec(decay="head", beta="head")) == "UpdateSpec(decay='head', beta='head')"
    assert all(eval(repr(spec)) == spec for spec in every_spec())


def test_every_spec_round_trips_through_json_and_is_hashable():
    specs = list(every_spec())
    assert [UpdateSpec.model_validate_json(spec.model_dump_json()) for spec in specs] == specs
    assert {spec: index for index, spec in enumerate(specs)} == {
        UpdateSpec(**spec.model_dump()): index for index, spec in enumerate(specs)
    }
    assert len(set(specs)) == len(specs)


def test_every_spec_yields_all_valid_combinations():
    count = 1
    for values in AXES.values():
        count *= len(values)
    additive = 5 * 3 * 4 * 2 * 2  # decay, beta without "separate", householders, read, scale
    euler = 5 * 4 * 2 * 2 * 3 * 4 * 2 * 2  # every beta, and erase key, erase from, negative eigenvalues
    reparametrised = 5 * 3 * 2 * 2 * 4 * 2 * 2  # beta without "separate", erase from, the two reparametrisations
    dplr = 5 * 3 * 2 * 2
    assert len(list(every_spec())) == additive + euler + reparametrised + dplr < count


def test_dplr_sets_erase_from_to_previous():
    assert UpdateSpec(transition="dplr") == UpdateSpec(transition="dplr", erase_from="previous")


def test_operands_follow_the_fields():
    spec = UpdateSpec(decay="channel", beta="channel", erase_key="own", householders=3)
    assert spec.operands(B=2, T=5, H=1, HV=4, K=8, V=6) == {
        "q": (2, 5, 1, 8),
        "k": (2, 5, 3, 1, 8),
        "v": (2, 5, 3, 4, 6),
        "log_decay": (2, 5, 4, 8),
        "erase": (2, 5, 3, 4, 8),
        "write": (2, 5, 3, 4, 6),
        "erase_key": (2, 5, 3, 1, 8),
    }
    separate = UpdateSpec(beta="separate", householders=2).operands(2, 5, 1, 4, 8, 6)
    assert list(separate) == ["q", "k", "v", "erase", "write"]
    assert separate["erase"] == separate["write"] == (2, 5, 2, 4)
    rated = UpdateSpec(transition="dplr", decay="rate", beta="head").operands(2, 5, 1, 4, 8, 6)
    assert list(rated) == ["q", "k", "v", "step", "rate", "beta", "a", "b"]
    assert rated["rate"] == (4, 8)
    assert rated["a"] == (2, 5, 4, 8)
    additive = UpdateSpec(transition="additive", beta="channel", decay="fixed").operands(2, 5, 1, 4, 8, 6)
    assert list(additive) == ["q", "k", "v", "log_decay", "write"]
    assert additive["log_decay"] == (4,)


def test_operands_are_in_the_order_of_update_inputs():
    order = UpdateInputs._fields
    for spec in every_spec():
        names = list(spec.operands(1, 1, 1, 1, 1, 1))
        assert names == sorted(names, key=order.index)


EQUATIONS = {
    "S_t = S_(t-1) + k_t v_t^T;  o_t = K^-1/2 S_t^T q_t": {"transition": "additive"},
    "S_t = Diag(d) S_(t-1) + k_t v_t^T;  o_t = S_t^T q_t": {"transition": "additive", "decay": "fixed", "scale": 1},
    "S_t = Diag(exp(step_t rate)) S_(t-1) + k_t v_t^T;  o_t = K^-1/2 S_t^T q_t": {
        "transition": "additive",
        "decay": "rate",
    },
    "S_t = d_t (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T;  o_t = K^-1/2 S_t^T q_t": {
        "decay": "head",
        "beta": "head",
    },
    "S_t = (I - 2 beta_t k_t k_t^T) Diag(d_t) S_(t-1) + beta_t k_t v_t^T;  o_t = K^-1/2 S_t^T q_t": {
        "decay": "channel",
        "beta": "head",
        "negative_eigenvalues": "erase",
    },
    "S_t = (d_t I - b_t k_t k_t^T) S_(t-1) + w_t k_t v_t^T;  o_t = K^-1/2 S_t^T q_t": {
        "decay": "head",
        "beta": "separate",
        "erase_from": "previous",
    },
    "S_t = (I - 2 b_t k_t k_t^T) S_(t-1) + 2 w_t k_t v_t^T;  o_t = K^-1/2 S_t^T q_t": {
        "beta": "separate",
        "negative_eigenvalues": "both",
    },
    "S_t = (d_t I - beta_t k_t e_t^T) S_(t-1) + beta_t k_t v_t^T;  o_t = K^-1/2 S_t^T q_t": {
        "decay": "head",
        "beta": "head",
        "erase_key": "own",
        "erase_from": "previous",
    },
    "S_t = (I - f_t k_t k_t^T) S_(t-1) + f_t k_t v_t^T;  o_t = K^-1/2 S_t^T q_t\n"
    "  with f_t = (1 - exp(-beta_t |k_t|^2)) / |k_t|^2": {"beta": "head", "reparam": "efla"},
    "S_t = (I - f_t k_t k_t^T) S_(t-1) + f_t k_t v_t^T;  o_t = K^-1/2 S_t^T q_t\n"
    "  with f_t = beta_t / (1 + beta_t |k_t|^2)": {"beta": "head", "reparam": "longhorn"},
    "S_t = (Diag(d_t) + b_t a_t^T) S_(t-1) + k_t v_t^T;  o_t = K^-1/2 S_t^T q_t": {
        "transition": "dplr",
        "decay": "channel",
    },
}


@pytest.mark.parametrize(("equation", "fields"), EQUATIONS.items(), ids=[str(fields) for fields in EQUATIONS.values()])
def test_printed_equation_matches_the_paper(equation, fields):
    assert str(UpdateSpec(**fields)) == equation


def test_only_specs_that_differ_in_erase_from_without_decay_print_the_same_equation():
    printed = defaultdict(list)
    for spec in every_spec():
        printed[str(spec)].append(spec)
    for specs in printed.values():
        same = {spec.model_copy(update={"erase_from": "decayed"}) for spec in specs}
        assert len(specs) == 1 or (len(same) == 1 and specs[0].decay == "none")


@pytest.mark.parametrize("seed", [0, 1])
def test_printed_equation_evaluates_to_the_reference(seed):
    shape = SHAPES["one_token"]._replace(B=1, HV=1, K=3, V=2)
    for case in pairwise_cases((shape,), (torch.float64,)):
        case = case._replace(state="given", seed=seed, layout="contiguous", regime="ordinary")
        case = case._replace(spec=case.spec.model_copy(update={"householders": 1}))
        inputs = draw(case)
        expected = ReferenceBackend().forward(case.spec, inputs)
        state, o = _Evaluator(case, inputs).evaluate(str(case.spec))
        torch.testing.assert_close(state, expected.state[0, 0], rtol=1e-12, atol=1e-12, msg=str(case.spec))
        torch.testing.assert_close(o[:, 0], expected.o[0, 0, 0], rtol=1e-12, atol=1e-12, msg=str(case.spec))


NAMED = {
    "linear attention": {"transition": "additive"},
    "RetNet": {"transition": "additive", "decay": "fixed"},
    "Mamba-2": {"transition": "additive", "decay": "head"},
    "GLA": {"transition": "additive", "decay": "channel"},
    "DeltaNet": {"beta": "head"},
    "Gated DeltaNet": {"beta": "head", "decay": "head"},
    "Kimi Delta Attention": {"beta": "head", "decay": "channel"},
    "EFLA": {"beta": "head", "reparam": "efla"},
    "Longhorn": {"beta": "head", "reparam": "longhorn"},
    "Comba": {"beta": "separate", "decay": "head", "erase_from": "previous"},
    "RWKV-7": {"transition": "dplr", "decay": "channel"},
    "DeltaProduct": {"beta": "head", "householders": 2},
    "Gated DeltaProduct": {"beta": "head", "decay": "head", "householders": 3, "negative_eigenvalues": "both"},
}


@pytest.mark.parametrize("name", NAMED)
def test_papers_lists_the_paper_of_a_known_update(name):
    assert any(paper.startswith(name) for paper in papers(UpdateSpec(**NAMED[name])))


def test_papers_is_empty_for_an_unpublished_combination():
    assert papers(UpdateSpec(beta="head", decay="channel", reparam="efla")) == []
    assert papers(UpdateSpec(beta="channel", householders=2)) == []


SPECTRA = [
    ({"beta": "head"}, "[0, 1] for |k| <= 1 and beta in [0, 1]"),
    ({"beta": "head", "negative_eigenvalues": "both"}, "[-1, 1] for |k| <= 1 and beta in [0, 1]"),
    ({"negative_eigenvalues": "erase"}, "[-1, 1] for |k| <= 1"),
    ({"beta": "head", "reparam": "efla"}, "(0, 1] for any k and any beta >= 0"),
    ({"beta": "separate"}, "[0, 1] for |k| <= 1 and erase in [0, 1]"),
    ({"beta": "separate", "negative_eigenvalues": "erase"}, "[-1, 1] for |k| <= 1 and erase in [0, 1]"),
    ({"beta": "head", "reparam": "longhorn"}, "(0, 1] for any k and any beta >= 0"),
    ({"beta": "channel"}, "[0, 1] for |k| <= 1 and erase in [0, 1]"),
    ({"beta": "channel", "reparam": "efla"}, "(0, 1] for any k and any erase >= 0"),
    ({"erase_key": "own"}, "unbounded: the erase key is free"),
    ({"transition": "dplr"}, "unbounded: a and b are free"),
    ({"transition": "additive"}, "[1, 1] for all inputs: nothing is erased"),
]


@pytest.mark.parametrize(("fields", "text"), SPECTRA, ids=[str(fields) for fields, _ in SPECTRA])
def test_spectrum_prints_interval_and_condition(fields, text):
    assert str(UpdateSpec(**fields).spectrum()) == text


@pytest.mark.parametrize("fields", [fields for fields, _ in SPECTRA[:9]], ids=str)
def test_eigenvalue_of_the_erased_direction_fills_the_stated_interval(fields):
    """With v = 0 and S_0 = k, one token multiplies S by the eigenvalue of the direction k."""
    spec = UpdateSpec(**fields)
    lengths = torch.linspace(0.01, 1 if spec.reparam == "none" else 30, 40, dtype=torch.float64)
    betas = torch.linspace(0, 1 if spec.reparam == "none" else 20, 40, dtype=torch.float64)
    length, beta = (x.flatten() for x in torch.meshgrid(lengths, betas, indexing="ij"))
    k = torch.nn.functional.normalize(torch.tensor([0.3, -2.0, 1.0], dtype=torch.float64), dim=0) * length[:, None]
    rows = k[:, None, None, :]
    erase, write = beta[:, None, None], torch.ones_like(beta)[:, None, None]
    if spec.beta == "channel":
        erase, write = torch.stack([erase, erase**2, erase**0.5], -1), write[..., None]
    inputs = UpdateInputs(
        q=rows,
        k=rows,
        v=torch.zeros_like(rows[..., :1]),
        beta=beta[:, None, None] if spec.beta == "head" else None,
        erase=erase if spec.beta in ("separate", "channel") else None,
        write=write if spec.beta in ("separate", "channel") else None,
        state=k[:, None, :, None],
    )
    eigenvalue = ReferenceBackend().forward(spec, inputs).state[:, 0, :, 0] @ k[0] / (k @ k[0])
    low, high, _ = spec.spectrum()
    assert eigenvalue.max() <= high + 1e-12
    assert eigenvalue.min() >= low - 1e-12
    assert eigenvalue.max() > high - 0.01
    assert eigenvalue.min() < low + 0.01


def test_pairwise_cover_contains_every_valid_pair():
    rows = [tuple(getattr(spec, axis) for axis in AXES) for spec in every_spec()]
    valid_pairs = {pair for row in rows for pair in pairs_of(row)}
    cover = pairwise(rows)
    assert {pair for row in cover for pair in pairs_of(row)} == valid_pairs
    assert len(cover) < len(rows) / 100


def test_pairwise_cases_contain_every_pair_with_a_case_axis():
    shapes = tuple(SHAPES[name] for name in ("plain", "column", "pack"))
    cases = [(*(getattr(case.spec, axis) for axis in AXES), *case[1:]) for case in pairwise_cases(shapes)]
    covered = {pair for row in cases for pair in pairs_of(row)}
    columns = [{row[column] for row in cases} for column in range(len(cases[0]))]
    for free in range(len(AXES), len(columns)):
        for other in range(free):
            missing = {(other, free, x, y) for x in columns[other] for y in columns[free]} - covered
            assert not missing


class _Evaluator:
    """Evaluates a printed equation. Juxtaposition is a product, * is elementwise, column vectors are [n, 1]."""

    def __init__(self, case: Case, inputs: UpdateInputs) -> None:
        x = {name: tensor.flatten(0, -2)[0] for name, tensor in inputs._asdict().items() if name in ("q", "k", "v")}
        column = {f"{name}_t": value[:, None] for name, value in x.items()}
        for name, symbol in (("erase", "b_t"), ("write", "w_t"), ("erase_key", "e_t"), ("a", "a_t"), ("b", "b_t")):
            if getattr(inputs, name) is not None:
                column[symbol] = getattr(inputs, name).flatten()[:, None]
        self.names = column | {
            "I": torch.eye(case.shape.K, dtype=torch.float64),
            "S_(t-1)": inputs.state[0, 0],
            "|k_t|^2": x["k"].square().sum(),
            "K^-1/2": torch.tensor(case.shape.K**-0.5, dtype=torch.float64),
        }
        if inputs.beta is not None:
            self.names["beta_t"] = inputs.beta.flatten()[0]
        if inputs.step is not None:
            self.names |= {"step_t": inputs.step.flatten()[0], "rate": inputs.rate[0]}
        if inputs.log_decay is not None:
            decay = inputs.log_decay.flatten().exp()
            vector = decay.expand(case.shape.K) if case.spec.decay == "fixed" else decay
            self.names["d" if case.spec.decay == "fixed" else "d_t"] = vector if vector.numel() > 1 else vector[0]

    def evaluate(self, equation: str) -> tuple[torch.Tensor, torch.Tensor]:
        update, _, factor = equation.partition("\n  with f_t = ")
        step, output = update.split(";  o_t = ")
        if factor:
            self.names["f_t"] = self._value(factor)
        self.names["S_t"] = self._value(step.removeprefix("S_t = "))
        return self.names["S_t"], self._value(output)

    def _value(self, text: str) -> torch.Tensor:
        known = sorted([*self.names, "exp", "Diag"], key=len, reverse=True)
        pattern = "|".join([*map(re.escape, known), r"\^T", r"\d+\.?\d*", r"[()+\-*/]"])
        self.tokens = re.findall(pattern, text)
        assert "".join(self.tokens) == text.replace(" ", ""), text
        return self._sum()

    def _sum(self) -> torch.Tensor:
        total = self._term()
        while self.tokens and self.tokens[0] in "+-":
            sign = self.tokens.pop(0)
            term = self._term()
            total = total + term if sign == "+" else total - term
        return total

    def _term(self) -> torch.Tensor:
        value = self._factor()
        while self.tokens and self.tokens[0] not in ("+", "-", ")"):
            if self.tokens[0] in ("*", "/"):
                sign, right = self.tokens.pop(0), self._factor()
                value = value * right if sign == "*" else value / right.squeeze()
            else:
                right = self._factor()
                value = value @ right if value.dim() == right.dim() == 2 else value * right
        return value

    def _factor(self) -> torch.Tensor:
        token = self.tokens.pop(0)
        if token == "-":
            return -self._term()
        if token == "(":
            value = self._sum()
            assert self.tokens.pop(0) == ")"
        elif token in ("exp", "Diag"):
            value = self._factor()
            value = value.squeeze().exp() if token == "exp" else torch.diag(value)
        elif token[0].isdigit():
            value = torch.tensor(float(token), dtype=torch.float64)
        else:
            value = self.names[token]
        if self.tokens and self.tokens[0] == "^T":
            self.tokens.pop(0)
            value = value.mT
        return value.squeeze() if value.shape == (1, 1) else value
