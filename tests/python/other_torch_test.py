"""The same sources beside the other torch: built, and the suites of LibTorch and Python run.

The build tree's own torch is tested by those suites themselves. The build beside the other one is
<build>/other-torch, with its environment in <build>/environments.
"""

from __future__ import annotations

import os
import unittest

import tier
from environments import (
    BUILD,
    NEWEST,
    OLDEST,
    SOURCE,
    fresh,
    other_torch,
    own_environment,
    require,
    requirements_with,
    run,
)

ROOMS = "libtorch,python,trainers"
BUILD_S = 3_600


class OtherTorchTest(unittest.TestCase):
    @tier.long
    def test_the_suites_of_libtorch_and_python(self) -> None:
        version = other_torch()
        self.assertIn(version, (OLDEST, NEWEST))
        tree = BUILD / "other-torch"
        with fresh(f"other-{version}", requirements_with(version)) as python:
            environment = own_environment()
            configure = ["cmake", "-S", SOURCE, "-B", tree, "-G", "Ninja", f"-DPython_EXECUTABLE={python}"]
            settings = [
                "-DCMAKE_BUILD_TYPE=Release",
                "-DZEROTH_TORCH=ON",
                "-DCMAKE_UNITY_BUILD=ON",
                "-DZEROTH_WERROR=ON",
            ]
            configured = require(run([*configure, *settings], timeout_s=600, environment=environment))
            self.assertIn(f"torch: {version}", configured)
            runner = [SOURCE / "tools/run-tests", f"{tree}::{ROOMS}", "--tier", "test"]
            targets = require(run([*runner, "--targets"], timeout_s=120, environment=environment)).split()
            programs = ["zeroth-run", "zeroth-gpt", "zeroth", "zeroth-trace", "zeroth-bench"]
            of_docs = ["comm_chaos"]  # which the commands in docs name
            wanted = ["zeroth_python", *programs, *of_docs, *targets]
            build = ["cmake", "--build", tree, "-j", str(os.cpu_count() or 1), "--target", *wanted]
            require(run(build, timeout_s=BUILD_S, environment=environment))
            tested = require(run(runner, timeout_s=BUILD_S, environment=environment))
        print(tested[-3_000:])
        self.assertIn(" 0 failed", tested)


if __name__ == "__main__":
    tier.main()
