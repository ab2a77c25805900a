"""The package as it is installed, and what it calls a unit."""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import tier
import zoo
from alone import config, train
from torch import nn

import zeroth


class Package(unittest.TestCase):
    def test_another_torch_is_refused_by_name(self) -> None:
        check = sys.modules["zeroth._preflight"].check_torch
        check("2.11.0+cu130", "2.11.0")
        with self.assertRaisesRegex(
            ImportError, r"built with torch 2\.11\.0\+cu130, and this is torch 2\.13\.0.*pip install"
        ):
            check("2.13.0+cpu", "2.11.0+cu130")

    def test_another_torch_ends_the_import_before_anything_else_is_loaded(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            fake = pathlib.Path(folder) / "torch"
            fake.mkdir()
            (fake / "__init__.py").write_text(
                '__version__ = "2.99.0+cpu"\nimport sys\nprint("_hashlib" in sys.modules)\n'
            )
            code = (
                "import atexit, sys; atexit.register(lambda: print(*sorted(name for name in sys.modules if name.startswith('zeroth'))))\n"  # noqa: E501
                "import zeroth"
            )
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}"},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(
            done.stderr.splitlines()[-1],
            rf"^ImportError: zeroth {zeroth.__version__} was built with torch [\d.+a-z]+, and this is "
            r"torch 2\.99\.0\+cpu.*Install torch==\d",
        )
        # Python's libcrypto, where it has one, is there before torch, and the shim comes after torch.
        self.assertEqual(done.stdout.split(), [str("_hashlib" in sys.modules), "zeroth._build"], done.stderr)

    def test_the_process_has_one_libcrypto(self) -> None:
        code = (
            "import zeroth, hashlib, ssl\n"
            "print(hashlib.sha256(b'abc').hexdigest())\n"
            "print(open('/proc/self/maps').read())"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        digest, *maps = done.stdout.splitlines()
        self.assertEqual(digest, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
        self.assertEqual(len({line.split()[-1] for line in maps if "libcrypto.so.3" in line}), 1)

    def test_a_deferred_build_imports_no_compiler(self) -> None:
        """Of dynamo and sympy, 65 MB a rank."""
        code = (
            "import sys, torch, zeroth; zeroth.deferred(lambda: torch.nn.Linear(4, 4)); "
            "print([name for name in ('sympy', 'torch._dynamo.convert_frame') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.stdout.strip(), "[]", done.stderr)

    def test_the_stub_names_what_is_there(self) -> None:
        module = sys.modules["zeroth._C"]
        stub = ast.parse((pathlib.Path(zeroth.__file__).parent / "_C.pyi").read_text())
        classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
        self.assertEqual(set(classes), {name for name in vars(module) if isinstance(getattr(module, name), type)})
        for name, node in classes.items():
            if issubclass(getattr(module, name), Exception):
                continue  # attributes of instances
            there = {member for member in vars(getattr(module, name)) if not member.startswith("_")}
            self.assertEqual(
                {item.name for item in node.body if isinstance(item, ast.FunctionDef) and item.name != "__init__"},
                there,
                name,
            )

    @tier.long
    def test_the_types_are_strict(self) -> None:
        package = pathlib.Path(zeroth.__file__).parent
        trainer = [
            str(path) for path in sorted((pathlib.Path(__file__).resolve().parents[2] / "examples/gpt").glob("*.py"))
        ]
        self.assertTrue(trainer)
        with tempfile.TemporaryDirectory() as cache:
            for checked in (["-p", "zeroth"], trainer):
                done = subprocess.run(
                    [sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, *checked],
                    cwd=package.parent,
                    env={**os.environ, "MYPYPATH": str(package.parent)},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_version_is_that_of_the_project(self) -> None:
        self.assertRegex(zeroth.__version__, r"^\d+\.\d+\.\d+$")


class Units(unittest.TestCase):
    def test_blocks_of_every_list_are_found(self) -> None:
        self.assertEqual(
            [(unit.name, unit.type) for unit in zeroth.units(zoo.make("plain"))],
            [("root", "Plain"), ("blocks.0", "Block"), ("blocks.1", "Block"), ("blocks.2", "Block")],
        )
        self.assertEqual(
            [unit.name for unit in zeroth.units(zoo.make("sequential"))], ["root", "body.1", "body.2", "body.3"]
        )
        self.assertEqual(
            [unit.name for unit in zeroth.units(zoo.make("translating"))],
            ["root", *(f"encoder.{i}" for i in range(3)), *(f"decoder.{i}" for i in range(4))],
        )
        self.assertEqual([unit.name for unit in zeroth.units(nn.Linear(2, 2))], ["root"])

    def test_small_lists_and_lists_inside_units_are_left_alone(self) -> None:
        def block() -> nn.Module:
            return nn.TransformerEncoderLayer(8, 2, 8)  # has a class of its own, and linears and norms inside

        model = nn.ModuleDict(
            {
                "head": nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 2)),
                "body": nn.ModuleList([nn.ModuleList([block(), block()]), nn.ModuleList([block(), nn.Linear(8, 8)])]),
            }
        )
        self.assertEqual([unit.name for unit in zeroth.units(model)], ["root", "body.0.0", "body.0.1", "body.1.0"])

    def test_units_of_several_kinds_share_the_ring_but_not_if_one_lies_in_the_other(self) -> None:
        model = zoo.make("translating")
        engine = zeroth.Engine(model, config(), log_level="off")
        self.assertEqual({name for name, repeated, _ in engine._core.units if not repeated}, {"root"})
        engine.close()
        nested = [*model.encoder, *model.decoder, *(block.linear for block in model.decoder)]
        engine = zeroth.Engine(model, config(), units=nested, log_level="off")
        self.assertEqual(
            {name for name, repeated, _ in engine._core.units if not repeated},
            {"root", *(f"decoder.{i}.linear" for i in range(4))},
        )
        train(engine)
        self.assertEqual(engine.memory_report().overflow_slots, 0)

    def test_lists_inside_a_list_are_looked_into(self) -> None:
        # A container is never called, so nothing would gather it; of two classes in turns the larger one is taken.
        class Wide(nn.Linear):
            pass

        layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.ModuleDict({"wide": Wide(4, 8)})]) for _ in range(3))
        model = nn.ModuleDict({"layers": layers})
        self.assertEqual(
            [unit.name for unit in zeroth.units(model)], ["root", *(f"layers.{i}.1.wide" for i in range(3))]
        )
        with self.assertRaisesRegex(zeroth.Error, r"never called.*which: layers\.0;.*got: ModuleList, a container"):
            zeroth.Engine(model, config(), units=list(layers), log_level="off")

    def test_sizes_are_those_of_the_engine(self) -> None:
        for name in zoo.MODELS:
            model = zoo.make(name)
            described = zeroth.units(model)
            sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
            engine = zeroth.Engine(model, config(), log_level="off")
            got = [(unit, sum(sizes[key] for key in names)) for unit, _, names in engine._core.units]
            self.assertEqual(got, [(unit.name, unit.num_params) for unit in described], name)
            engine.close()

    def test_the_user_may_choose(self) -> None:
        model = zoo.make("plain")
        engine = zeroth.Engine(model, config(), units=[model.blocks[1], model.head], log_level="off")
        self.assertEqual([name for name, _, _ in engine._core.units], ["root", "blocks.1", "head"])
        train(engine)
        with self.assertRaisesRegex(zeroth.Error, "not a module inside the model"):
            zeroth.Engine(zoo.make("plain"), config(), units=[nn.Linear(2, 2)], log_level="off")


if __name__ == "__main__":
    tier.main()
