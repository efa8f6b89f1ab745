"""Planted bugs in the source, and the test that catches each: `make mutations`.

Each mutation changes one line of a temporary copy of the package and runs one test there. The test must pass without
the change and fail with it; a mutation that survives shows a gap in the tests. Words select mutations by name:
`make mutations ARGS="scan decay"` runs those whose names contain both.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from mutation_kernels import Mutation, Suite
from mutation_table import MUTATIONS
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parents[1]


class Outcome(NamedTuple):
    """Result of one pytest run. caught_by: the id of the first failed test, or None."""

    code: int
    caught_by: str | None
    seconds: float
    output: str


def mutated_source(mutation: Mutation, package: Path) -> str:
    """Return the changed text of the file, or exit if the source no longer has the old text."""
    source = (package / mutation.path).read_text(encoding="utf-8")
    occurrences = source.count(mutation.old)
    if occurrences != mutation.count:
        sys.exit(
            f"stale mutation {mutation.name!r}: {mutation.path} has {mutation.old!r} {occurrences} times, "
            f"not {mutation.count}"
        )
    return source.replace(mutation.old, mutation.new)


def copy_package(package: Path) -> None:
    """Copy the tracked files."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listing.stdout.split("\0"):
        if (ROOT / name).is_file():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, package / name)


def run_tests(tests: list[str], suite: Suite, package: Path) -> Outcome:
    """Run tests of the copy up to the first failure."""
    # The copy precedes the installed package on the path; the entry points come from the installed metadata.
    path = os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    if suite == "test-kernels":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "--timeout=180", "-p", "no:cacheprovider"]
    start = time.perf_counter()
    process = subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)], cwd=package, env=environment, capture_output=True, text=True
    )
    output = process.stdout + process.stderr
    failed = re.search(r"^FAILED tests/(.*?)(?: - .*)?$", output, re.MULTILINE)
    return Outcome(process.returncode, failed and failed[1], time.perf_counter() - start, output)


def check_tests_pass(mutations: list[Mutation], package: Path) -> None:
    """Run the tests of all mutations on the unchanged copy; exit if one fails or is skipped."""
    for suite in ("test", "test-kernels"):
        tests = list(dict.fromkeys(mutation.test for mutation in mutations if mutation.suite == suite))
        outcome = run_tests(tests, suite, package) if tests else None
        if outcome and (outcome.code != 0 or re.search(r"\d+ skipped", outcome.output)):
            sys.exit(f"a test of {suite} does not pass on the unchanged source:\n{outcome.output}")


def run_mutation(mutation: Mutation, package: Path) -> Outcome:
    """Run the test of a mutation on the changed copy, and undo the change."""
    path = package / mutation.path
    source = path.read_text(encoding="utf-8")
    path.write_text(mutated_source(mutation, package), encoding="utf-8")
    # Python detects a change by size and time stamp in seconds.
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    try:
        return run_tests([mutation.test], mutation.suite, package)
    finally:
        path.write_text(source, encoding="utf-8")
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)


def main(words: list[str]) -> int:
    """Run the mutations whose names contain all words; return 1 if one survives."""
    mutations = [mutation for mutation in MUTATIONS if all(word in mutation.name for word in words)]
    if not mutations:
        sys.exit(f"no mutation has all of {words} in its name")
    for mutation in mutations:
        mutated_source(mutation, ROOT)
    console = Console()
    table = Table("mutation", Column("suite", no_wrap=True), Column("caught by", overflow="fold"), "seconds")
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "deltazoo"
        copy_package(package)
        console.print(f"running the tests of {len(mutations)} mutations on the unchanged source", highlight=False)
        check_tests_pass(mutations, package)
        for number, mutation in enumerate(mutations, 1):
            console.print(f"{number}/{len(mutations)} {mutation.name}", highlight=False)
            outcome = run_mutation(mutation, package)
            if outcome.code not in (0, 1) or (outcome.code == 1 and outcome.caught_by is None):
                sys.exit(f"pytest could not run the test of {mutation.name!r}:\n{outcome.output}")
            survivors += outcome.caught_by is None
            caught_by = escape(outcome.caught_by) if outcome.caught_by else "[bold red]none: it survives"
            table.add_row(mutation.name, mutation.suite, caught_by, f"{outcome.seconds:.0f}")
    console.print(table)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
