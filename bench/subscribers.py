"""One publisher and several subscribers on this host: bytes per changed value, a subscriber that is killed, memory.

    python bench/subscribers.py --parameters 124e6 --subscribers 8 --changed 0.01

Prints one JSON object. `bytes_per_changed_value` has payloads, headers and padding of every frame that a subscriber received of a version.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time

import torch

import paramill as pm

LAYERS = 12
# A frame's header, and the most that its payload is filled up by. A publisher's frames have 65,536 values.
FRAME_BYTES, FRAME_VALUES = 64 + 63, 65_536


def peak_bytes() -> int:
    """The most memory that this process had; that of its parent does not count."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    hashed = hashlib.blake2b()
    for name in sorted(tensors):
        hashed.update(tensors[name].view(torch.int16).numpy().data)
    return hashed.hexdigest()


def subscribe(url: str) -> None:
    """A subscriber: says of each version what it is and what it cost, and commits it into the same tensors."""
    with pm.Subscriber(url, timeout=300) as subscriber:
        model, before = None, 0
        for _ in subscriber:
            began = time.perf_counter()
            model = subscriber.commit(into=model)
            seconds, received = time.perf_counter() - began, subscriber.bytes_received
            words = {
                "version": subscriber.committed,
                "bytes": received - before,
                "digest": digest(model),
                "commit_seconds": seconds,
                "held_bytes": subscriber.memory_bytes,
                "peak_bytes": peak_bytes(),
            }
            before = received
            print(json.dumps(words), flush=True)


def start(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, "--url", url], stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str], version: int) -> dict:
    """What a subscriber says of a version."""
    assert process.stdout is not None
    while True:
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a subscriber has ended")
        words = json.loads(line)
        if words["version"] >= version:
            return words


def change(model: dict[str, torch.Tensor], share: float, generator: torch.Generator) -> int:
    """Changes a share of the values, each to another bf16. How many."""
    changed = 0
    for tensor in model.values():
        mask = torch.rand(tensor.shape, generator=generator) < share
        bits = tensor.view(torch.int16)
        bits[mask] ^= 1 << 5
        changed += int(mask.sum())
    return changed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=float, default=124e6)
    parser.add_argument("--subscribers", type=int, default=8)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.url:
        return subscribe(args.url)
    generator = torch.Generator().manual_seed(1)
    per_layer = int(args.parameters / LAYERS)
    model = {f"layer{n}": torch.randn(per_layer, generator=generator).bfloat16() for n in range(LAYERS)}
    values = per_layer * LAYERS
    frames = LAYERS * -(-per_layer // FRAME_VALUES)
    result: dict = {"parameters": values, "subscribers": args.subscribers, "versions": []}
    with pm.Publisher(model, timeout=300) as publisher:
        processes = [start(publisher.url) for _ in range(args.subscribers)]
        publisher.wait(0, readers=args.subscribers, timeout=300)
        for process in processes:
            said(process, 0)
        for version in range(1, args.versions + 1):
            changed = change(model, args.changed, generator)
            if version == args.versions:
                # One of them is killed in the middle, and started anew.
                processes[0].kill()
                processes[0].wait()
            began = time.perf_counter()
            publisher.publish(model)
            published = time.perf_counter() - began
            publisher.wait(version, readers=args.subscribers - int(version == args.versions), timeout=300)
            everywhere = time.perf_counter() - began
            expected = digest(model)
            others = processes[int(version == args.versions) :]
            words = [said(process, version) for process in others]
            assert all(it["digest"] == expected for it in words), "a subscriber has other bits"
            cost = [(it["bytes"] + frames * FRAME_BYTES) / changed for it in words]
            result["versions"].append(
                {
                    "changed": changed,
                    "publish_seconds": published,
                    "everywhere_seconds": everywhere,
                    "bytes_per_changed_value": [round(it, 3) for it in cost],
                    "commit_seconds": max(it["commit_seconds"] for it in words),
                }
            )
            result["subscriber_held_bytes"] = max(it["held_bytes"] for it in words)
            result["subscriber_peak_bytes"] = max(it["peak_bytes"] for it in words)
        began = time.perf_counter()
        processes[0] = start(publisher.url)
        again = said(processes[0], args.versions)
        result["restarted"] = {"seconds": time.perf_counter() - began, "is_identical": again["digest"] == expected}
        memory = sum(shard["memory_bytes"] for shard in publisher.status()["shards"])
        result["server_bytes"] = memory
        result["publisher_peak_bytes"] = peak_bytes()
    for process in processes:
        assert process.wait(60) == 0, "a subscriber failed"
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
