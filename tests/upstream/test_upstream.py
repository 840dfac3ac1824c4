# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of its scheduler and prefix cache pass with this platform.

The rest of those that fit a device of any kind: ``make vllm-tests``.
"""

import pytest
from upstream import archive, selection
from upstream.run import run

pytestmark = pytest.mark.more


@pytest.fixture(scope="module", autouse=True)
def available():
    try:
        archive.extracted()
    except archive.UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_scheduler_and_prefix_cache():
    assert run(selection.QUICK) == 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_everything_selected():
    assert run(selection.RUN) == 0


def test_every_file_is_either_run_or_left_out_for_a_reason():
    tests = archive.extracted() / "tests" / "v1"
    for file in sorted(tests.rglob("test_*.py")):
        name = file.relative_to(tests).as_posix()
        reasons = list(selection.reasons(name))
        assert (name in selection.RUN) != bool(reasons), name
        assert len(reasons) <= 1, (name, reasons)
