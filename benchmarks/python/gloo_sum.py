#!/usr/bin/env python3
"""How long Gloo takes, through PyTorch, to sum 64 MiB of float32 of two processes. Each worker prints one JSON object,
{"sum": median microseconds}.

    gloo_sum.py [--quick]
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed


def main():
    torch.set_num_threads(1)
    rank = int(os.environ["HEDDLE_RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    values = torch.full((16 << 20,), float(rank + 1))
    times = []
    for _ in range(4 if "--quick" in sys.argv else 20):
        torch.distributed.barrier()
        begin = time.perf_counter()
        torch.distributed.all_reduce(values)
        times.append(time.perf_counter() - begin)
    print(json.dumps({"sum": statistics.median(times[1:]) * 1e6}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
