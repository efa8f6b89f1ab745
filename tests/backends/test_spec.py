"""The spec as a value: what it refuses, how it travels, what it prints, what it states of its spectrum."""

import re
from collections import defaultdict

import pytest
import torch
from pydantic import ValidationError

from deltazoo.backends.base import UpdateInputs
from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.conformance.pairwise import AXES, every_spec, pairs_of, pairwise, pairwise_cases
from deltazoo.backends.papers import papers
from deltazoo.backends.reference import ReferenceBackend
from deltazoo.backends.shapes import SHAPES
from deltazoo.backends.spec import UpdateSpec

REFUSED = [
    ({"transition": "additive", "reparam": "efla"}, "reparam='efla' steps the delta rule"),
    ({"transition": "dplr", "reparam": "longhorn"}, "reparam='longhorn' steps the delta rule"),
    ({"transition": "additive", "erase_key": "own"}, "erase_key='own' needs the delta rule"),
    ({"transition": "dplr", "erase_key": "own"}, "erases with its operands a and b"),
    ({"transition": "additive", "negative_eigenvalues": "both"}, "has no erase term"),
    ({"transition": "dplr", "negative_eigenvalues": "erase"}, "negative_eigenvalues='erase' needs the delta rule"),
    ({"transition": "additive", "erase_from": "previous"}, "erase_from='previous' needs an erase term"),
    ({"transition": "dplr", "erase_from": "decayed"}, "always reads the previous state"),
    ({"transition": "dplr", "householders": 2}, "householders=2 needs transition 'delta' or 'additive'"),
    ({"reparam": "efla", "negative_eigenvalues": "both"}, "positive by construction"),
    ({"reparam": "longhorn", "negative_eigenvalues": "erase"}, "positive by construction"),
    ({"reparam": "efla", "erase_key": "own"}, "the step is exact only for e = k"),
    ({"reparam": "longhorn", "erase_key": "own"}, "the step is exact only for e = k"),
    ({"householders": 0}, "greater than or equal to 1"),
    ({"householders": 1.5}, "valid integer"),
    ({"decay": "chanel"}, "'none', 'fixed', 'head', 'channel' or 'rate'"),
    ({"beta": None}, "'none', 'head' or 'channel'"),
    ({"scale": float("nan")}, "finite number"),
    ({"scale": float("inf")}, "finite number"),
    ({"version": 2}, "Input should be 1"),
    ({"decays": "head"}, "Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("axes", "sentence"), REFUSED, ids=[str(axes) for axes, _ in REFUSED])
def test_a_combination_that_means_nothing_is_refused_with_the_reason(axes, sentence):
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        UpdateSpec(**axes)


def test_a_spec_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        UpdateSpec().decay = "head"


def test_every_spec_survives_json_and_is_its_own_key():
    specs = list(every_spec())
    assert [UpdateSpec.model_validate_json(spec.model_dump_json()) for spec in specs] == specs
    assert {spec: index for index, spec in enumerate(specs)} == {
        UpdateSpec(**spec.model_dump()): index for index, spec in enumerate(specs)
    }
    assert len(set(specs)) == len(specs)


def test_the_product_leaves_out_only_what_the_spec_refuses():
    count = 1
    for values in AXES.values():
        count *= len(values)
    additive = 5 * 3 * 4 * 2 * 2  # decay, beta, householders, read, scale
    euler = 5 * 3 * 2 * 2 * 3 * 4 * 2 * 2  # and erase key, erase from, negative eigenvalues
    reparametrised = 5 * 3 * 2 * 2 * 4 * 2 * 2  # erase from, the two reparametrisations
    dplr = 5 * 3 * 2 * 2
    assert len(list(every_spec())) == additive + euler + reparametrised + dplr < count


def test_dplr_reads_the_previous_state_without_being_told():
    assert UpdateSpec(transition="dplr") == UpdateSpec(transition="dplr", erase_from="previous")


def test_operands_are_what_the_axes_ask_for():
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
    rated = UpdateSpec(transition="dplr", decay="rate", beta="head").operands(2, 5, 1, 4, 8, 6)
    assert list(rated) == ["q", "k", "v", "step", "rate", "beta", "a", "b"]
    assert rated["rate"] == (4, 8)
    assert rated["a"] == (2, 5, 4, 8)
    additive = UpdateSpec(transition="additive", beta="channel", decay="fixed").operands(2, 5, 1, 4, 8, 6)
    assert list(additive) == ["q", "k", "v", "log_decay", "write"]
    assert additive["log_decay"] == (4,)


def test_operands_come_in_the_order_of_the_inputs():
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


@pytest.mark.parametrize(("equation", "axes"), EQUATIONS.items(), ids=[str(axes) for axes in EQUATIONS.values()])
def test_the_equation_reads_as_in_the_paper(equation, axes):
    assert str(UpdateSpec(**axes)) == equation


def test_two_specs_print_one_equation_only_where_nothing_decays_before_the_erase():
    printed = defaultdict(list)
    for spec in every_spec():
        printed[str(spec)].append(spec)
    for specs in printed.values():
        same = {spec.model_copy(update={"erase_from": "decayed"}) for spec in specs}
        assert len(specs) == 1 or (len(same) == 1 and specs[0].decay == "none")


@pytest.mark.parametrize("seed", [0, 1])
def test_the_printed_equation_computes_what_the_reference_computes(seed):
    shape = SHAPES["one_token"]._replace(B=1, HV=1, K=3, V=2)
    for case in pairwise_cases((shape,), (torch.float64,)):
        case = case._replace(state="given", seed=seed, layout="contiguous", regime="ordinary")
        case = case._replace(spec=case.spec.model_copy(update={"householders": 1}))
        inputs = draw(case)
        want = ReferenceBackend().forward(case.spec, inputs)
        state, o = _Reader(case, inputs).evaluate(str(case.spec))
        torch.testing.assert_close(state, want.state[0, 0], rtol=1e-12, atol=1e-12, msg=str(case.spec))
        torch.testing.assert_close(o[:, 0], want.o[0, 0, 0], rtol=1e-12, atol=1e-12, msg=str(case.spec))


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
    "Comba": {"beta": "head", "decay": "head", "erase_key": "own", "erase_from": "previous"},
    "RWKV-7": {"transition": "dplr", "decay": "channel"},
    "DeltaProduct": {"beta": "head", "householders": 2},
    "Gated DeltaProduct": {"beta": "head", "decay": "head", "householders": 3, "negative_eigenvalues": "both"},
}


@pytest.mark.parametrize("name", NAMED)
def test_a_spec_names_the_papers_it_equals(name):
    assert any(paper.startswith(name) for paper in papers(UpdateSpec(**NAMED[name])))


def test_a_new_combination_names_no_paper():
    assert papers(UpdateSpec(beta="head", decay="channel", reparam="efla")) == []
    assert papers(UpdateSpec(beta="channel", householders=2)) == []


SPECTRA = [
    ({"beta": "head"}, "[0, 1] for |k| <= 1 and beta in [0, 1]"),
    ({"beta": "head", "negative_eigenvalues": "both"}, "[-1, 1] for |k| <= 1 and beta in [0, 1]"),
    ({"negative_eigenvalues": "erase"}, "[-1, 1] for |k| <= 1"),
    ({"beta": "head", "reparam": "efla"}, "(0, 1] for any k and any beta >= 0"),
    ({"beta": "head", "reparam": "longhorn"}, "(0, 1] for any k and any beta >= 0"),
    ({"beta": "channel"}, "unbounded: the erase strength differs over channels"),
    ({"erase_key": "own"}, "unbounded: the erase key is free"),
    ({"transition": "dplr"}, "unbounded: a and b are free"),
    ({"transition": "additive"}, "[1, 1] for all inputs: nothing is erased"),
]


@pytest.mark.parametrize(("axes", "words"), SPECTRA, ids=[str(axes) for axes, _ in SPECTRA])
def test_the_spectrum_is_stated_with_its_condition(axes, words):
    assert str(UpdateSpec(**axes).spectrum()) == words


@pytest.mark.parametrize("axes", [axes for axes, _ in SPECTRA[:5]], ids=str)
def test_the_erased_direction_has_an_eigenvalue_inside_the_stated_interval(axes):
    """With v = 0 and S_0 = k, one token multiplies S by the eigenvalue of the direction k."""
    spec = UpdateSpec(**axes)
    lengths = torch.linspace(0.01, 1 if spec.reparam == "none" else 30, 40, dtype=torch.float64)
    betas = torch.linspace(0, 1 if spec.reparam == "none" else 20, 40, dtype=torch.float64)
    length, beta = (x.flatten() for x in torch.meshgrid(lengths, betas, indexing="ij"))
    k = torch.nn.functional.normalize(torch.tensor([0.3, -2.0, 1.0], dtype=torch.float64), dim=0) * length[:, None]
    rows = k[:, None, None, :]
    inputs = UpdateInputs(
        q=rows,
        k=rows,
        v=torch.zeros_like(rows[..., :1]),
        beta=beta[:, None, None] if spec.beta == "head" else None,
        state=k[:, None, :, None],
    )
    eigenvalue = ReferenceBackend().forward(spec, inputs).state[:, 0, :, 0] @ k[0] / (k @ k[0])
    low, high, _ = spec.spectrum()
    assert eigenvalue.max() <= high + 1e-12
    assert eigenvalue.min() >= low - 1e-12
    assert eigenvalue.max() > high - 0.01
    assert eigenvalue.min() < low + 0.01


def test_the_pairwise_cover_holds_every_pair_that_can_occur():
    rows = [tuple(getattr(spec, axis) for axis in AXES) for spec in every_spec()]
    every = {pair for row in rows for pair in pairs_of(row)}
    few = pairwise(rows)
    assert {pair for row in few for pair in pairs_of(row)} == every
    assert len(few) < len(rows) / 100


def test_the_pairwise_cases_cross_every_axis_with_every_other():
    shapes = tuple(SHAPES[name] for name in ("plain", "column", "pack"))
    cases = [(*(getattr(case.spec, axis) for axis in AXES), *case[1:]) for case in pairwise_cases(shapes)]
    held = {pair for row in cases for pair in pairs_of(row)}
    columns = [{row[column] for row in cases} for column in range(len(cases[0]))]
    for free in range(len(AXES), len(columns)):
        for other in range(free):
            missing = {(other, free, x, y) for x in columns[other] for y in columns[free]} - held
            assert not missing


class _Reader:
    """Evaluate a printed equation on numbers: juxtaposition is a product, * elementwise, columns are [n, 1]."""

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
        found = self._factor()
        while self.tokens and self.tokens[0] not in ("+", "-", ")"):
            if self.tokens[0] in ("*", "/"):
                sign, right = self.tokens.pop(0), self._factor()
                found = found * right if sign == "*" else found / right.squeeze()
            else:
                right = self._factor()
                found = found @ right if found.dim() == right.dim() == 2 else found * right
        return found

    def _factor(self) -> torch.Tensor:
        token = self.tokens.pop(0)
        if token == "-":
            return -self._term()
        if token == "(":
            found = self._sum()
            assert self.tokens.pop(0) == ")"
        elif token in ("exp", "Diag"):
            found = self._factor()
            found = found.squeeze().exp() if token == "exp" else torch.diag(found)
        elif token[0].isdigit():
            found = torch.tensor(float(token), dtype=torch.float64)
        else:
            found = self.names[token]
        if self.tokens and self.tokens[0] == "^T":
            self.tokens.pop(0)
            found = found.mT
        return found.squeeze() if found.shape == (1, 1) else found
