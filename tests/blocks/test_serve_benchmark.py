"""The benchmark of the engine measures every load, and says what the figures mean."""

import json

from deltazoo.blocks.inspect.serve_benchmark import ServeBenchConfig, ServeBenchmark, bench_serve
from deltazoo.blocks.spec.stack_spec import StackSpec

SPEC = StackSpec(width=16, depth=2, vocab=50, pattern="gated_deltanet(heads=2) + attention(heads=2)", mlp="none")


def test_rows_have_the_figures_of_each_load():
    reported = []
    config = ServeBenchConfig(loads=(1, 3), requests=4, slots=3, prompt=16, output=8)
    benchmark = bench_serve("tiny", SPEC, config, report=reported.append)
    assert [row.load for row in benchmark.rows] == [1, 3]
    assert [benchmark.missing for benchmark in reported] == [2, 1, 0]
    for row in benchmark.rows:
        assert row.requests == 4
        assert row.tokens_per_second > 0
        assert 0 < row.first_ms <= row.first_p95_ms
        assert 0 <= row.token_ms <= row.token_p95_ms
    assert ServeBenchmark.model_validate(json.loads(benchmark.model_dump_json())) == benchmark
    text = benchmark.markdown()
    assert "3 slots, prompts of up to 16" in text
    assert text.count("\n| ") == 4


def test_rows_of_an_engine_with_drafts_have_the_tokens_per_pass():
    config = ServeBenchConfig(loads=(2,), requests=3, slots=2, prompt=16, output=16, speculate=2)
    benchmark = bench_serve("tiny", SPEC, config)
    (row,) = benchmark.rows
    assert 1 <= row.tokens_per_pass <= 3
    text = benchmark.markdown()
    assert "2 drafts per step, greedy" in text
    assert f"| {row.tokens_per_pass:.2f} |" in text
