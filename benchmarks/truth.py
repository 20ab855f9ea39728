"""Half a hundred things that may happen, in any order: is anything false reported, or unknown what was certain?

The long form of tests/integration/test_truth.py: `python benchmarks/truth.py --steps 100000`. Prints how many reports
were judged. Ends with the shortest sequence that it found where one was false.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from integration.test_truth import Machine

IN_A_ROW = 50  # steps of one world


class Counting(Machine):
    """Adds up what was judged."""

    steps = reports = unknown = worlds = 0

    def teardown(self) -> None:
        if hasattr(self, "observer"):
            Counting.worlds += 1
            Counting.reports += self.observer.account.reports
            Counting.unknown += self.observer.account.unknown
        super().teardown()


def main() -> None:
    """Run as many steps as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5_000)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    begin = time.monotonic()
    run_state_machine_as_test(
        Counting,
        settings=settings(
            max_examples=max(1, options.steps // IN_A_ROW),
            stateful_step_count=IN_A_ROW,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"{Counting.worlds} worlds of {IN_A_ROW} steps at the most in {time.monotonic() - begin:.0f} s:", end=" ")
    print(f"{Counting.reports} reports, 0 false; {Counting.unknown} outcomes unknown")


if __name__ == "__main__":
    main()
