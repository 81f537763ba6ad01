"""What every peer's worker shares with `paramill bench`: instructions on stdin, answers on stdout, a JSON object a line."""

import ctypes
import json
import signal
import sys
import time

MAX_TIMES = 20000
PR_SET_PDEATHSIG = 1


def part():
    """Has the kernel end this process with its parent, and returns the first line of stdin."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    return json.loads(sys.stdin.readline())


def answer(kind, fields):
    print(json.dumps({kind: fields}), flush=True)


def obey(iterate, checksum):
    """Runs as many iterations as it is told to, until it is told to leave."""
    answer("ready", {"held": None})
    for line in sys.stdin:
        order = json.loads(line)
        if order == "leave":
            break
        iterations = order["run"]["iterations"]
        stride = max(1, -(-iterations // MAX_TIMES))
        times, longest = [], 0
        began = last = time.perf_counter_ns()
        for iteration in range(iterations):
            iterate()
            now = time.perf_counter_ns()
            taken = (now - last) // 1000
            last = now
            longest = max(longest, taken)
            if iteration % stride == 0:
                times.append(taken)
        seconds = (last - began) / 1e9
        answer("ran", {"seconds": seconds, "times_us": times, "longest_us": longest})
    answer("left", {"checksum": checksum()})
