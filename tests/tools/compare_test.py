#!/usr/bin/env python3
"""Shows how benchmarks/compare.sh builds, runs and judges, with stand-ins for what it builds and runs."""

import contextlib
import io
import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.dont_write_bytecode = True
sys.path.insert(0, str(BENCHMARKS))
from compare import __main__ as command  # noqa: E402
from compare import bars, build, dist, gpu, host, programs, python  # noqa: E402

BAR = {"what": "a copy", "ours": 2, "unit": "us", "against": "another", "limit": 1, "ratio": 2, "spread": [1, 3],
       "bar": "<= 3", "holds": True}


def context_for(build_dir, may_build=False):
    return command.Context(str(build_dir), False, may_build, bars.Report())


class CompareTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def replace(self, target, name, value):
        """Until the test has ended."""
        patch = mock.patch.object(target, name, value)
        patch.start()
        self.addCleanup(patch.stop)

    def write_program(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(stat.S_IRWXU)
        return path

    def run_command(self, *words):
        """Status, stdout and stderr of compare.sh in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = command.main([*words])
        return status, out.getvalue(), err.getvalue()

    def add_group(self, name, **sections):
        self.replace(command, "GROUPS", {**command.GROUPS, name: types.SimpleNamespace(TARGETS=[], SECTIONS=sections)})


class StatusTest(CompareTest):
    """0: every bar holds, 1: one falls short, 2: something could not be built or run."""

    def assert_not_run(self, found, *parts):
        status, _, errors = found
        self.assertEqual(status, 2, errors)
        self.assertEqual(len(errors.splitlines()), 1, errors)
        self.assertTrue(errors.startswith("compare.sh: "), errors)
        for part in parts:
            self.assertIn(part, errors)

    # All of these used to have status 1.
    def test_unknown_groups_and_sections_are_not_run(self):
        self.assert_not_run(self.run_command("engin"), "unknown group 'engin'", "engine, local")
        self.assert_not_run(self.run_command("engine:nap"), "unknown section 'engine:nap'", "empty, bodies")

    def test_what_cannot_be_started_is_named_in_one_line(self):
        self.add_group("mine", job=lambda _: programs.run_job({"worker": ["/no/such/worker"]}, {}, 1),
                       other=lambda _: subprocess.run(["/no/such/other"], check=False),
                       slow=lambda _: subprocess.run(["sleep", "1000"], check=False, timeout=0.01))
        for section, part in {"job": "/no/such/worker", "other": "/no/such/other", "slow": "timed out"}.items():
            self.assert_not_run(self.run_command("--build-dir", "/", f"mine:{section}"), part)
        self.replace(os, "environ", {**os.environ, "PATH": str(self.folder)})
        self.assert_not_run(self.run_command("local:sum"), "cmake --preset release", "No such file")

    def test_words_that_are_no_figures_are_an_error_that_names_their_program(self):
        for text in ("true", "echo no figures"):
            path = self.write_program("program", text)
            with self.assertRaisesRegex(RuntimeError, f"{path}: expected an object on the last line"):
                programs.run_json([str(path)])
        self.write_program("program", 'echo \'{"what": "half a bar"}\' > "$2"')
        with self.assertRaisesRegex(RuntimeError, "program: expected a bar.*half a bar"):
            programs.add_bars(context_for(self.folder), "program")

    def test_a_mistake_of_ours_is_no_bar_that_falls_short(self):
        self.add_group("mine", wrong=lambda _: {}["no"])
        status, _, errors = self.run_command("--build-dir", "/", "mine")
        self.assertEqual(status, 2)
        self.assertIn("Traceback", errors)

    def test_a_file_that_cannot_be_written_is_named_before_anything_runs(self):
        ran = []
        self.add_group("mine", section=ran.append)
        file = str(self.folder / "none" / "bars.json")
        self.assert_not_run(self.run_command("--build-dir", "/", "mine", "--json", file), file)
        self.assertEqual(ran, [])
        self.assertEqual(self.run_command("--build-dir", "/", "mine", "--json", str(self.folder / "bars.json"))[0], 0)
        self.assertEqual(len(ran), 1)

    def test_bars_tell_the_rest_and_what_there_was_is_in_the_file(self):
        def section(context):
            context.report.add(**{**BAR, "holds": False})
            raise RuntimeError("no more")

        self.add_group("mine", short=lambda context: context.report.add(**{**BAR, "holds": False}), fails=section)
        self.assertEqual(self.run_command("--build-dir", "/", "mine:short")[0], 1)
        self.assertEqual(self.run_command("--build-dir", "/", "mine:short", "--quick")[0], 0)
        file = self.folder / "bars.json"
        self.assert_not_run(self.run_command("--build-dir", "/", "mine:fails", "--json", str(file)), "no more")
        self.assertEqual(len(json.loads(file.read_text())["bars"]), 1)


class ChildrenTest(CompareTest):
    def setUp(self):
        super().setUp()
        self.started = []
        start = subprocess.Popen

        def keep(*arguments, **options):
            self.started.append(start(*arguments, **options))
            return self.started[-1]

        self.replace(subprocess, "Popen", keep)
        self.addCleanup(lambda: [process.kill() for process in self.started])

    # They used to run on.
    def test_none_is_left_when_another_cannot_be_started(self):
        with self.assertRaisesRegex(RuntimeError, "/no/such/program"):
            host._until_last([["sleep", "1000"], ["/no/such/program"]], 2)
        self.assertEqual([process.returncode for process in self.started], [-9])

    def test_none_is_left_when_time_is_up(self):
        with self.assertRaises(subprocess.TimeoutExpired), programs.Children() as children:
            children.start(["sleep", "1000"], stdout=subprocess.PIPE)
            children.start(["sleep", "1000"], stdout=subprocess.PIPE).communicate(timeout=0.01)
        self.assertEqual([process.returncode for process in self.started], [-9, -9])


class BarsTest(CompareTest):
    # It used to count, and to hold.
    def test_a_line_without_a_bar_is_measured_and_no_bar(self):
        bar = json.dumps(BAR)
        line = json.dumps({**BAR, "what": "beside it", "bar": "no bar", "holds": None})
        self.write_program("program", f"printf '%s\\n' '{bar}' '{line}' > \"$2\"")
        self.add_group("mine", section=lambda context: programs.add_bars(context, "program"))
        file = self.folder / "bars.json"
        status, text, _ = self.run_command("--build-dir", str(self.folder), "mine", "--json", str(file))
        self.assertEqual(status, 0)
        self.assertEqual(text, "mine | a copy | ours 2 us | another 1 us | ratio 2.00 [1.00..3.00] | bar <= 3 | holds\n"
                               "mine | beside it | ours 2 us | another 1 us | ratio 2.00 [1.00..3.00] | no bar | measured\n"
                               "1 bars, 0 fall short\n")
        found = json.loads(file.read_text())
        self.assertEqual([bar["what"] for bar in found["bars"]], ["a copy"])
        self.assertEqual([(line["what"], line["holds"]) for line in found["measured"]], [("beside it", None)])


class GpuTest(CompareTest):
    def setUp(self):
        super().setUp()
        self.replace(gpu, "missing", lambda _: [])
        self.replace(build, "build_cuda", lambda _: str(self.folder))

    def test_nothing_to_build_is_not_built(self):
        # `cmake --build --target` without one is an error.
        called = self.folder / "called"
        self.write_program("bin/cmake", f'echo "$*" >> {called}')
        self.replace(os, "environ", {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}"})
        build.build_release([])
        self.assertFalse(called.exists())
        build.build_release(["one", "two"])
        self.assertEqual(called.read_text().splitlines()[-1], "--build --preset release --target one two")

    # Later groups used to look there, too.
    def test_only_the_gpus_program_is_in_the_folder_with_cuda(self):
        self.write_program("benchmarks/gpu/bench_gpu", f"printf '%s\\n' '{json.dumps(BAR)}' > \"$3\"")
        context = context_for("/release", may_build=True)
        gpu.SECTIONS["engine"](context)
        self.assertEqual(len(context.report.bars), 1)
        self.assertEqual(context.build_dir, "/release")

    def test_a_relative_folder_is_taken_as_it_is(self):
        self.write_program("benchmarks/gpu/bench_gpu", f"printf '%s\\n' '{json.dumps(BAR)}' > \"$3\"")
        context = context_for(os.path.relpath(self.folder))
        gpu.SECTIONS["kernels"](context)
        self.assertEqual(len(context.report.bars), 1)

    # Nothing used to be said.
    def test_why_a_gpu_cannot_be_used_is_said_once(self):
        why = "a GPU (the driver is too old)"
        for said in (f"echo '{json.dumps({'missing': why})}' > \"$3\"", f": > \"$3\"; echo '{why}' >&2"):
            self.write_program("benchmarks/gpu/bench_gpu", said)
            context = context_for(self.folder)
            for section in gpu.SECTIONS.values():
                section(context)
            self.assertEqual([entry["peer"] for entry in context.report.missing], [why])
        self.write_program("benchmarks/gpu/bench_gpu", ': > "$3"')
        with self.assertRaisesRegex(RuntimeError, "does not say why"):
            gpu.SECTIONS["engine"](context_for(self.folder))


class MxnetTest(CompareTest):
    # heddle used to have shared memory, and MXNet has not.
    def test_the_group_dist_compares_over_tcp(self):
        ran = []

        def run(program, environment=None):
            ran.append(("heddle" if "heddle" in program else "mxnet", environment))
            return {"4096": 1, "keys": 1}

        self.replace(dist, "run_json", run)
        self.replace(python, "missing", lambda _: [])
        context = context_for("/release")
        dist.run_mxnet(context)
        ours = [environment for name, environment in ran if name == "heddle"]
        self.assertEqual(len(ours), context.reps)
        for environment in ours:
            self.assertEqual(environment, {"PYTHONPATH": "/release/python", "HEDDLE_SHARED_MEMORY": "0"})
        self.assertEqual(len(context.report.bars), 2)

    # Each section, and each case of one, used to try again.
    def test_to_install_it_is_tried_once(self):
        tried = []

        def run(words, **_):
            tried.append(words)
            return subprocess.CompletedProcess(words, 1)

        self.replace(python, "ENVIRONMENT", str(self.folder))
        self.replace(subprocess, "run", run)
        context = context_for("/release", may_build=True)
        for _ in range(3):
            self.assertEqual(list(python.programs(context, "store.py")), ["heddle"])
        self.assertEqual(len(dist.missing(context)), 1)
        self.assertEqual(len(tried), 1)


if __name__ == "__main__":
    unittest.main()
