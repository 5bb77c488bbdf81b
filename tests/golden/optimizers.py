#!/usr/bin/env python3
"""Writes optimizers.json: what the optimizers and schedules of MXNet 1.9.1 compute.

    python3.11 tests/golden/optimizers.py [--python PROGRAM] [--environment DIR]

installs mxnet 1.9.1 and numpy 1.23.5 from PyPI into a virtual environment of its own (in DIR, or a
temporary folder; they need Python 3.11 or older), runs every optimizer in it and writes the file beside
this script. tests/kvstore/golden_test.cc repeats the runs with heddle and compares.

A case is a list of arrays ("shapes"), which start at numbers(...) below and take "steps" updates with
gradients from there: a numbered stream of numbers for each array, the weights first, then step by step.
"weights" holds all arrays, one after the other, after the first step and after the last, as base64 of
little-endian bytes of "dtype"; with "every": n only their elements 0, n, 2n and so on. With "row_sparse":
"gradient" the gradients are row-sparse and lack each row r for which 3 divides stream + r; with "all" the
weights are row-sparse too.
"""

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
REQUIREMENTS = ["mxnet==1.9.1", "numpy==1.23.5"]
SHAPES = [[1], [5, 3], [2, 3, 4]]
STEPS = 5

# Parameters by the names of heddle. A parameter of "key" is a multiplier, a "schedule" replaces the
# learning rate.
COMMON = [
    {},
    {"learning_rate": 0.1, "weight_decay": 0.01, "rescale_grad": 0.25},
    {"learning_rate": 0.05, "weight_decay": 0.1, "rescale_grad": 0.5, "clip_gradient": 0.3},
]
OPTIMIZERS = {
    "sgd": COMMON + [{**case, "momentum": 0.9} for case in COMMON],
    "ccsgd": [{"learning_rate": 0.1, "momentum": 0.5}],
    "nag": COMMON + [{**case, "momentum": 0.9} for case in COMMON],
    "adam": COMMON + [{"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-4}],
    "adagrad": COMMON + [{"epsilon": 1e-3}],
    "rmsprop": COMMON + [{**case, "centered": 1} for case in COMMON]
               + [{"learning_rate": 0.1, "clip_weights": 0.7, "gamma1": 0.8, "epsilon": 1e-4},
                  {"learning_rate": 0.1, "clip_weights": 0.7, "gamma1": 0.8, "gamma2": 0.5, "centered": 1}],
    "adadelta": COMMON + [{"rho": 0.5, "epsilon": 1e-3}],
    "ftrl": COMMON + [{"lamda1": 0.3, "beta": 0.5, "learning_rate": 0.2}],
    "ftml": COMMON + [{"beta1": 0.4, "beta2": 0.9, "epsilon": 1e-4}],
    "signum": COMMON + [{**case, "momentum": 0} for case in COMMON] + [{"momentum": 0.5, "wd_lh": 0.1}],
    "adamax": COMMON + [{"beta1": 0.7, "beta2": 0.8}],
    "nadam": COMMON + [{"beta1": 0.7, "beta2": 0.8, "epsilon": 1e-4, "schedule_decay": 0.1}],
    "lamb": COMMON + [{"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-4},
                      {"learning_rate": 0.1, "bias_correction": 0, "weight_decay": 0.1},
                      {"learning_rate": 0.1, "lower_bound": 0.5, "upper_bound": 2}],
    "lars": COMMON + [{**case, "momentum": 0.9} for case in COMMON]
            + [{"learning_rate": 0.1, "eta": 0.1, "epsilon": 0.1, "momentum": 0.5}],
    "groupadagrad": [{}, {"learning_rate": 0.1, "rescale_grad": 0.25},
                     {"rescale_grad": 0.5, "clip_gradient": 0.3, "epsilon": 1e-3}],
    "dcasgd": COMMON + [{"lamda": 0.5, "learning_rate": 0.1}],
    "lbsgd": COMMON + [{**case, "momentum": 0.9} for case in COMMON]
             + [{"batch_scale": 2, "warmup_epochs": 1, "updates_per_epoch": 4, "warmup_strategy": s,
                 "momentum": m} for s in range(4) for m in (0, 0.9)]
             + [{"begin_epoch": 1, "updates_per_epoch": 3, "batch_scale": 2, "weight_decay": 0.1}],
    "test": [{}, {"rescale_grad": 0.25}],
}
# By row-sparse gradients.
DECAYED = {"learning_rate": 0.1, "weight_decay": 0.1, "rescale_grad": 0.5, "clip_gradient": 0.3}
NOT_DECAYED = {**DECAYED, "weight_decay": 0}
ROW_SPARSE_SHAPES = [[6, 2], [9, 3]]
ROW_SPARSE = {
    "sgd": [{**DECAYED, "momentum": m, "lazy_update": lazy} for m in (0, 0.9) for lazy in (0, 1)],
    "adam": [{**DECAYED, "lazy_update": lazy} for lazy in (0, 1)],
    "lars": [{**DECAYED, "momentum": 0.9, "eta": 0.1, "lazy_update": lazy} for lazy in (0, 1)],
    "nag": [DECAYED, {**DECAYED, "momentum": 0.9}],
    "lbsgd": [{**DECAYED, "momentum": m, "warmup_strategy": s, "batch_scale": b}
              for m in (0, 0.9) for s in (0, 3) for b in (1, 2)],
    "adagrad": [NOT_DECAYED],
    "ftrl": [{}, DECAYED],
    "groupadagrad": [NOT_DECAYED],
}
# With norms over more elements than heddle sums at once.
LARGE = [
    {"optimizer": "lamb", "parameters": {"weight_decay": 0.1}, "shapes": [[10000]]},
    {"optimizer": "lars", "parameters": {**DECAYED, "momentum": 0.9, "eta": 0.1}, "shapes": [[10000]]},
    {"optimizer": "groupadagrad", "parameters": NOT_DECAYED, "shapes": [[2, 5000]]},
]
SCHEDULED = [
    {"name": "factor", "step": 2, "factor": 0.5, "base_lr": 0.4},
    {"name": "poly", "max_update": 8, "base_lr": 0.4, "warmup_steps": 2, "warmup_begin_lr": 0.1},
]
SCHEDULES = [
    {"name": "factor", "step": 3, "factor": 0.5, "base_lr": 0.4},
    {"name": "factor", "step": 1, "factor": 0.9, "stop_factor_lr": 0.1, "base_lr": 0.4},
    {"name": "factor", "step": 4, "factor": 0.7, "warmup_steps": 6, "warmup_begin_lr": 0.005},
    {"name": "factor", "step": 4, "factor": 0.7, "warmup_steps": 6, "warmup_mode": "constant",
     "warmup_begin_lr": 0.001},
    {"name": "multi_factor", "steps": [3, 4, 20], "factor": 0.3, "base_lr": 0.4},
    {"name": "multi_factor", "steps": [3, 12], "factor": 0.3, "warmup_steps": 5},
    {"name": "poly", "max_update": 20, "base_lr": 0.4},
    {"name": "poly", "max_update": 20, "base_lr": 0.4, "pwr": 1, "final_lr": 0.1, "warmup_steps": 5},
    {"name": "poly", "max_update": 20, "pwr": 3, "warmup_steps": 5, "warmup_mode": "constant",
     "warmup_begin_lr": 0.005},
    {"name": "cosine", "max_update": 20, "base_lr": 0.4},
    {"name": "cosine", "max_update": 20, "base_lr": 0.4, "final_lr": 0.1, "warmup_steps": 5,
     "warmup_begin_lr": 0.2},
]
RENAMED = {"weight_decay": "wd"}
RENAMED_OF = {"adagrad": {"epsilon": "eps"}, "lars": {"epsilon": "eps"}, "groupadagrad": {"epsilon": "eps"}}
STRATEGIES = ["linear", "power2", "sqrt", "lars"]
SWITCHES = ["centered", "bias_correction", "lazy_update"]


def numbers(stream, count):
    """Multiples of 1/512 in (-2, 2), exact in every dtype and never 0."""
    values = []
    for i in range(count):
        bits = ((stream * 1000003 + i) * 2654435761 + 974711) & 0xFFFFFFFF
        bits ^= bits >> 15
        bits = (bits * 2246822519) & 0xFFFFFFFF
        values.append((2 * (bits >> 22) - 1023) / 512)
    return values


def make_schedule(mx, options):
    options = dict(options)
    name = options.pop("name")
    if name == "multi_factor":
        options["step"] = options.pop("steps")
    kinds = {"factor": mx.lr_scheduler.FactorScheduler, "poly": mx.lr_scheduler.PolyScheduler,
             "multi_factor": mx.lr_scheduler.MultiFactorScheduler,
             "cosine": mx.lr_scheduler.CosineScheduler}
    return kinds[name](**options)


def make_optimizer(mx, case):
    parameters = dict(case["parameters"])
    names = {**RENAMED, **RENAMED_OF.get(case["optimizer"], {})}
    arguments = {names.get(name, name): value for name, value in parameters.items()}
    if "warmup_strategy" in arguments:
        arguments["warmup_strategy"] = STRATEGIES[arguments["warmup_strategy"]]
    for name in SWITCHES:
        if name in arguments:
            arguments[name] = bool(arguments[name])
    if "multi_precision" in arguments:
        arguments["multi_precision"] = bool(arguments["multi_precision"])
    if "schedule" in case:
        schedule = make_schedule(mx, case["schedule"])
        arguments["lr_scheduler"] = schedule
        # Optimizers with a default of their own overwrite the schedule's with it.
        arguments["learning_rate"] = schedule.base_lr
    optimizer = mx.optimizer.create(case["optimizer"], **arguments)
    optimizer.set_lr_mult({f"key{key}": value for key, value in case.get("lr_mult", {}).items()})
    optimizer.set_wd_mult({f"key{key}": value for key, value in case.get("wd_mult", {}).items()})
    return optimizer


def encode(numpy, arrays, every):
    joined = numpy.concatenate([a.asnumpy().reshape(-1) for a in arrays])[::every]
    return base64.b64encode(joined.astype(joined.dtype.newbyteorder("<")).tobytes()).decode()


def run(mx, numpy, case):
    """The case with its values, or None where MXNet fails or gets numbers that are not finite."""
    updaters = [mx.optimizer.get_updater(make_optimizer(mx, case)) for _ in case["shapes"]]
    if "schedule" in case:  # one optimizer for all keys, as the schedule counts
        updaters = updaters[:1] * len(case["shapes"])
    weights, stream = [], 0

    def draw(shape):
        nonlocal stream
        stream += 1
        size = int(numpy.prod(shape))
        return mx.nd.array(numpy.reshape(numbers(stream, size), shape), dtype=case["dtype"])

    def draw_gradient(shape):
        gradient = draw(shape)
        if "row_sparse" not in case:
            return gradient
        ids = [row for row in range(shape[0]) if (stream + row) % 3 != 0]
        return mx.nd.sparse.row_sparse_array((gradient.asnumpy()[ids], ids), shape=shape, dtype=case["dtype"])

    weights = [draw(shape) for shape in case["shapes"]]
    if case.get("row_sparse") == "all":
        weights = [weight.tostype("row_sparse") for weight in weights]
    values = []
    try:
        for step in range(case["steps"]):
            for i, weight in enumerate(weights):
                updaters[i](f"key{i}", draw_gradient(weight.shape), weight)
            if not all(numpy.isfinite(weight.asnumpy()).all() for weight in weights):
                raise ValueError(f"not finite after {step + 1} steps")
            if step in (0, case["steps"] - 1):
                values.append(encode(numpy, weights, case.get("every", 1)))
    except (mx.base.MXNetError, ValueError) as error:
        print(f"left out: {case['optimizer']} {case['dtype']} {case['parameters']}: "
              f"{str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return {**case, "weights": values}


def generate():
    os.environ["MXNET_STORAGE_FALLBACK_LOG_VERBOSE"] = "0"
    import mxnet as mx
    import numpy

    cases = []
    for name, settings in OPTIMIZERS.items():
        shapes = [[1, 1], [5, 3], [2, 12]] if name == "groupadagrad" else SHAPES
        for dtype, multi_precision in (("float32", 0), ("float16", 1), ("float16", 0), ("float64", 0)):
            chosen = settings if dtype == "float32" else settings[1:2] + settings[-1:]
            for parameters in chosen:
                if multi_precision:
                    parameters = {**parameters, "multi_precision": 1}
                cases.append({"optimizer": name, "dtype": dtype, "parameters": parameters,
                              "shapes": shapes, "steps": STEPS})
        if name == "test":
            continue
        decay = {} if name == "groupadagrad" else {"weight_decay": 0.1}
        cases.append({"optimizer": name, "dtype": "float32", "parameters": decay,
                      "shapes": shapes, "steps": STEPS, "lr_mult": {"0": 0.5, "2": 2.0},
                      "wd_mult": {"1": 0.0, "2": 3.0}})
        # LBSGD asks the schedule before it counts the update.
        for schedule in SCHEDULED if name != "lbsgd" else []:
            cases.append({"optimizer": name, "dtype": "float32", "parameters": {}, "shapes": shapes[1:2],
                          "steps": STEPS, "schedule": schedule})
    for name, settings in ROW_SPARSE.items():
        cases += [{"optimizer": name, "dtype": "float32", "parameters": parameters,
                   "shapes": ROW_SPARSE_SHAPES, "steps": STEPS, "row_sparse": kind}
                  for parameters in settings for kind in ("gradient", "all")
                  # By another formula in MXNet.
                  if not (name == "nag" and kind == "all" and "momentum" in parameters)]
    cases += [{**case, "dtype": "float32", "steps": STEPS, "every": 101} for case in LARGE]
    cases = [done for done in (run(mx, numpy, case) for case in cases) if done is not None]
    schedules = [{"schedule": options, "rates": [make(n) for n in range(1, 31)]}
                 for options in SCHEDULES for make in [make_schedule(mx, options)]]
    with open(os.path.join(HERE, "optimizers.json"), "w", encoding="ascii") as file:
        file.write('{"source": "mxnet 1.9.1",\n"cases": [\n')
        file.write(",\n".join(json.dumps(case) for case in cases))
        file.write('\n],\n"schedules": [\n')
        file.write(",\n".join(json.dumps(schedule) for schedule in schedules))
        file.write("\n]}\n")
    print(f"{len(cases)} cases, {len(schedules)} schedules")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="python3.11", help="makes the environment")
    parser.add_argument("--environment", metavar="DIR", help="use and keep the environment there")
    parser.add_argument("--generate", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.generate:
        generate()
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.environment or scratch
        program = os.path.join(folder, "bin", "python")
        if not os.path.exists(program):
            subprocess.run([arguments.python, "-m", "venv", folder], check=True)
            subprocess.run([program, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        subprocess.run([program, "-W", "ignore", os.path.abspath(__file__), "--generate"], check=True)


if __name__ == "__main__":
    main()
