#!/usr/bin/env python3
"""A lab of four hosts with 1 Gbit/s links each, and an exchange of a model between them.

Two servers and two workers run in network namespaces of their own, joined by a bridge in a fifth. Every link is shaped
on both ends, since a shaper holds back only what leaves. Bytes are counted where the shapers count them, with the headers
of every packet, and set against what the links could have carried in that time. Everything is removed at the end.

Needs root, Linux with veth, bridge and the tbf shaper, and iproute2. Example:

    sudo bench/lab.py --paramill target/release/paramill --json
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time

PREFIX = f"plab{os.getpid()}"
SWITCH = f"{PREFIX}sw"
# TEST-NET-3 (RFC 5737): addresses that are nobody's.
SUBNET = "203.0.113"
SAMPLE_S = 0.5


def main():
    arguments = parse_arguments()
    if os.geteuid() != 0:
        sys.exit("error: network namespaces need root; run this with sudo")
    if not os.access(arguments.paramill, os.X_OK):
        sys.exit(f"error: {arguments.paramill} is no program; build it: cargo build --release")
    # A signal ends the script like an error does, so that everything is removed.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    hosts = arguments.servers + arguments.workers
    lab = Lab(hosts, arguments.mbit, arguments.buffer_ms)
    try:
        lab.build()
        report = measure(arguments, lab)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: `{' '.join(error.cmd)}` failed: {(error.stderr or '').strip()}")
    finally:
        lab.remove()
    show(report, arguments.json)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="What else is given goes to `paramill bench exchange`, such as --elements N --tensors K.",
    )
    parser.add_argument("--paramill", default="target/release/paramill", metavar="PATH", help="the program")
    parser.add_argument("--model", metavar="NAME", help="what is exchanged (default: resnet50)")
    parser.add_argument("--servers", type=positive, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--cores", type=positive, default=1, metavar="K", help="data cores of a server (default: %(default)s)")
    parser.add_argument("--placement", default="uniform", metavar="P", help="which server holds what (default: %(default)s: all servers' links are used for every tensor)")
    parser.add_argument("--mbit", type=positive, default=1000, metavar="N", help="rate of a link, each way (default: %(default)s)")
    parser.add_argument("--buffer-ms", type=positive, default=10, metavar="N", help="what a port of the switch can hold (default: %(default)s)")
    parser.add_argument("--seconds", type=positive, default=20, metavar="N", help="how long it is measured (default: %(default)s)")
    parser.add_argument("--congestion", metavar="NAME", help="TCP's congestion control (default: the system's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments, arguments.further = parser.parse_known_args()
    return arguments


def positive(text):
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


class Lab:
    """Hosts 0, 1, 2, … as network namespaces, and what joins them."""

    def __init__(self, hosts, mbit, buffer_ms):
        self.hosts = hosts
        self.mbit = mbit
        self.buffer_ms = buffer_ms

    def namespace(self, host):
        return f"{PREFIX}h{host}"

    def address(self, host):
        return f"{SUBNET}.{host + 1}"

    def build(self):
        run("ip", "netns", "add", SWITCH)
        run("ip", "-n", SWITCH, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", SWITCH, "link", "set", "br0", "up")
        for host in range(self.hosts):
            namespace = self.namespace(host)
            run("ip", "netns", "add", namespace)
            port = f"port{host}"
            run("ip", "-n", SWITCH, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            run("ip", "-n", SWITCH, "link", "set", port, "master", "br0", "up")
            run("ip", "-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", namespace, "link", "set", device, "up")
            # Large enough for the largest packet that a host makes before it is cut, and for two hosts that send to
            # a third at once.
            for where, device in ((SWITCH, port), (namespace, "eth0")):
                shape = ["rate", f"{self.mbit}mbit", "burst", "128kb", "latency", f"{self.buffer_ms}ms"]
                run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *shape)

    def remove(self):
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
        for line in listed.splitlines():
            name = line.split()[0]
            if name.startswith(PREFIX):
                for pid in run("ip", "netns", "pids", name).split():
                    os.kill(int(pid), signal.SIGKILL)
                # Devices go with their namespaces.
                run("ip", "netns", "delete", name)

    def count(self):
        """Bytes that each link has carried from and to its host: as the shaper counts them, and as the device does."""
        shaped, counted = [], []
        ports = tc_bytes(SWITCH)
        for host in range(self.hosts):
            out = tc_bytes(self.namespace(host))["eth0"]
            shaped.append((out, ports[f"port{host}"]))
        return {"time": time.monotonic(), "links": shaped}

    def device_bytes(self):
        """What the host's end of each link says in /sys/class/net."""
        files = ["/sys/class/net/eth0/statistics/tx_bytes", "/sys/class/net/eth0/statistics/rx_bytes"]
        read = lambda host: run("ip", "netns", "exec", self.namespace(host), "cat", *files)
        return [tuple(map(int, read(host).split())) for host in range(self.hosts)]


def tc_bytes(namespace):
    """Bytes that the shaper of every device in a namespace has let through."""
    listed = json.loads(run("tc", "-n", namespace, "-s", "-j", "qdisc", "show"))
    return {entry["dev"]: entry["bytes"] for entry in listed if entry["kind"] == "tbf"}


def measure(arguments, lab):
    command = [
        os.path.abspath(arguments.paramill), "bench", "exchange", "--json", "--quiet",
        "--workers", str(arguments.workers),
        "--servers", str(arguments.servers),
        "--cores", str(arguments.cores),
        "--transport", "tcp",
        "--placement", arguments.placement,
        "--rounds", "1",
        "--seconds", str(arguments.seconds),
        "--run-with", f"ip netns exec {PREFIX}h{{}}",
    ]
    for server in range(arguments.servers):
        command += ["--host", lab.address(server)]
    if arguments.model:
        command += ["--model", arguments.model]
    if arguments.congestion:
        command += ["--congestion", arguments.congestion]
    samples = [lab.count()]
    done = threading.Event()

    def sample():
        while not done.wait(SAMPLE_S):
            samples.append(lab.count())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        process = subprocess.run(command + arguments.further, stdout=subprocess.PIPE, text=True, check=False)
    finally:
        done.set()
        sampler.join()
    if process.returncode != 0:
        sys.exit(f"error: the exchange failed ({process.returncode})")
    samples.append(lab.count())
    return Report(arguments, lab, samples, json.loads(process.stdout)).values


class Report:
    """Rates in the middle of the exchange: between a tenth and nine tenths of all bytes, so that neither the start
    nor the end counts, but every pause in between does."""

    def __init__(self, arguments, lab, samples, exchange):
        total = lambda sample: sum(map(sum, sample["links"]))
        everything = total(samples[-1]) - total(samples[0])
        share = lambda sample: (total(sample) - total(samples[0])) / max(everything, 1)
        middle = [sample for sample in samples if 0.1 <= share(sample) <= 0.9]
        if len(middle) < 10:
            sys.exit("error: the exchange was too short to be measured; give more --seconds")
        first, last = middle[0], middle[-1]
        seconds = last["time"] - first["time"]
        capacity = arguments.mbit * 1e6 / 8 * seconds
        links = [
            {
                "host": f"server {host}" if host < arguments.servers else f"worker {host - arguments.servers}",
                "sent_fraction": (after[0] - before[0]) / capacity,
                "received_fraction": (after[1] - before[1]) / capacity,
            }
            for host, (before, after) in enumerate(zip(first["links"], last["links"]))
        ]
        both_ways = capacity * 2 * lab.hosts
        # Each byte of payload leaves one host and reaches another: it is carried by two links.
        payload = exchange["goodput_gb_s"] * 1e9 * 2 * seconds
        busiest = max(max(link["sent_fraction"], link["received_fraction"]) for link in links)
        self.values = {
            "model": exchange["model"],
            "servers": arguments.servers,
            "workers": arguments.workers,
            "mbit_per_link": arguments.mbit,
            "congestion": exchange.get("congestion"),
            "seconds": seconds,
            "fraction_of_capacity": (total(last) - total(first)) / both_ways,
            "payload_fraction_of_capacity": payload / both_ways,
            "busiest_direction_fraction": busiest,
            "links": links,
            "device_bytes": [{"sent": sent, "received": received} for sent, received in lab.device_bytes()],
            "goodput_gb_s": exchange["goodput_gb_s"],
            "iterations_per_s": exchange["iterations_per_s"],
            "iteration_ms": exchange["iteration_ms"],
        }


def show(report, as_json):
    if as_json:
        print(json.dumps(report))
        return
    print(
        f"{report['model']}, {report['workers']} workers, {report['servers']} servers, "
        f"{report['mbit_per_link']} Mbit/s a link ({report['congestion']})"
    )
    print(f"{'link':12}{'sent':>8}{'received':>10}")
    for link in report["links"]:
        print(f"{link['host']:12}{link['sent_fraction']:8.1%}{link['received_fraction']:10.1%}")
    print(f"of all links' capacity, both ways: {report['fraction_of_capacity']:.1%}")
    print(f"of it payload:                     {report['payload_fraction_of_capacity']:.1%}")
    print(
        f"goodput {report['goodput_gb_s']:.3f} GB/s, {report['iterations_per_s']:.2f} iterations/s, "
        f"over {report['seconds']:.1f} s"
    )


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
