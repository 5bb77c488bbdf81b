#!/usr/bin/env python3
"""How long a training step of the digits' network takes on two processes: with heddle.torch over dist_sync, or
with PyTorch's DistributedDataParallel on Gloo. Each worker prints one JSON object, {"step": median microseconds}.

    torch_step.py heddle|gloo [--quick]

Bound: a step without any exchange.
"""

import argparse
import json
import os
import pathlib
import statistics
import time

import numpy
import torch


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exchange", choices=["heddle", "gloo"])
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    path = pathlib.Path(__file__).resolve().parents[2] / "examples" / "data" / "digits.csv"
    table = torch.from_numpy(numpy.loadtxt(path, delimiter=",", dtype="float32"))
    pictures, digits = table[:, :64] / 16, table[:, 64].long()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if arguments.exchange == "heddle":
        import heddle.torch

        optimizer = heddle.torch.DistributedOptimizer(optimizer, model.named_parameters(), "dist_sync")
    else:
        torch.distributed.init_process_group("gloo", rank=int(os.environ["HEDDLE_RANK"]), world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(model)

    times = []
    for i in range(100 if arguments.quick else 2000):
        batch = slice(i % 50 * 32, i % 50 * 32 + 32)
        begin = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pictures[batch]), digits[batch]).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    print(json.dumps({"step": statistics.median(times[len(times) // 5:]) * 1e6}))
    if arguments.exchange == "gloo":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
