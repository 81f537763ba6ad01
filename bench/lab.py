#!/usr/bin/env python3
"""A lab of hosts with slow links on one machine: network namespaces, joined by a bridge.

Every host has a namespace, an address and a link to a switch, and a second link in a second network if asked for. Links are
shaped on both ends, since a shaper holds back only what leaves. Everything is removed at the end, whatever ends it.

    sudo bench/lab.py run --hosts 4 --mbit 100 -- ping -c 3 203.0.113.2     anything, in host 0
    sudo bench/lab.py run --hosts 4 --mbit 100 --each -- ./job.sh           in every host, by its LAB variables
    sudo bench/lab.py rate 2 50                                             from elsewhere, while it runs
    sudo bench/lab.py exchange --mbit 1000 --json                           an exchange of a model, and the links' use

Needs root, Linux with veth, bridge and the tbf shaper, and iproute2.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

PREFIX = "plab"
# TEST-NET-3 and TEST-NET-2 (RFC 5737): addresses that are nobody's.
SUBNETS = ("203.0.113", "198.51.100")
MAX_HOSTS = 250
# Large enough for the largest packet that a host makes before it is cut, and for two hosts that send to a third at once.
BURST = "128kb"
SAMPLE_S = 0.5
# How long processes that are asked to end may take.
GRACE_S = 2.0

RUN_HELP = """\
CMD runs in host 0, or once in every host with --each; then the first copy that fails ends all. Its environment has

  PARAMILL_LAB_HOST        the number of its host, from 0
  PARAMILL_LAB_HOSTS       how many there are
  PARAMILL_LAB_ADDRESS     the host's address; PARAMILL_LAB_ADDRESS2 on the second link
  PARAMILL_LAB_ADDRESSES   all hosts' addresses, with commas between them; PARAMILL_LAB_ADDRESSES2
  PARAMILL_LAB_ENTER       the command that takes others to a host, with {} in place of its number

In the words of CMD, {host} or {rank}, {hosts}, {address}, {address0}, {address1} and so on, {addresses} and {enter} stand for the
same. A server and two workers on a host each:

  lab.py run --hosts 3 --mbit 100 -- paramill bench exchange --workers 2 --servers 1 --run-with '{enter}' --host '{address0}'
"""


def main():
    arguments = parse_arguments(sys.argv[1:])
    if os.geteuid() != 0:
        sys.exit("error: network namespaces need root; run this with sudo")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            sys.exit(f"error: there is no `{program}` here; install it: apt-get install iproute2")
    # A signal ends the script like an error does, so that everything is removed.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        sys.exit(arguments.action(arguments))
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: `{' '.join(error.cmd)}` failed: {(error.stderr or '').strip()}")


# ---- What was typed ----


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter

    run = commands.add_parser("run", help="run a command between hosts", epilog=RUN_HELP, formatter_class=raw)
    run.set_defaults(action=run_command)
    run.add_argument("--hosts", type=hosts, required=True, metavar="N", help=f"1 to {MAX_HOSTS}")
    run.add_argument("--links", type=int, choices=(1, 2), default=1, help="links of each host (default: %(default)s)")
    run.add_argument("--mbit2", type=rate, metavar="R", help="rate of the second link (default: that of the first)")
    run.add_argument("--each", action="store_true", help="run the command in every host, not only in host 0")
    run.add_argument(
        "--change", type=change, action="append", default=[], metavar="at=TIME,host=H,mbit=R[,link=L]",
        help="another rate from a time after the start on, such as at=10s,host=2,mbit=50; host=all; may be repeated",
    )
    run.add_argument("words", nargs="+", metavar="CMD", help="the command, after --")

    change_rate = commands.add_parser("rate", help="change the rate of a host's link in a lab that runs")
    change_rate.set_defaults(action=change_running)
    change_rate.add_argument("host", type=host_number, metavar="HOST", help="the host's number, or all")
    change_rate.add_argument("mbit", type=rate, metavar="MBIT", help="Mbit/s, each way")
    change_rate.add_argument("--link", type=int, choices=(1, 2), default=1, help="which of its links (default: %(default)s)")
    change_rate.add_argument("--lab", metavar="NAME", help="which lab, where several run")

    exchange = commands.add_parser(
        "exchange", help="exchange a model and measure the links' use",
        description="Servers and workers on hosts of their own exchange a model. Bytes are counted where the shapers count\n"
        "them, with the headers of every packet, and set against what the links could have carried in that time.",
        epilog="What else is given goes to `paramill bench exchange`, such as --codec f16 or --elements N --tensors K.",
        formatter_class=raw,
    )
    exchange.set_defaults(action=measure_exchange)
    exchange.add_argument("--paramill", default="target/release/paramill", metavar="PATH", help="the program")
    exchange.add_argument("--model", metavar="NAME", help="what is exchanged (default: resnet50)")
    exchange.add_argument("--servers", type=hosts, default=2, metavar="N", help="default: %(default)s")
    exchange.add_argument("--workers", type=hosts, default=2, metavar="N", help="default: %(default)s")
    exchange.add_argument("--cores", type=hosts, default=1, metavar="K", help="data cores of a server (default: %(default)s)")
    exchange.add_argument("--placement", default="uniform", metavar="P", help="which server holds what (default: %(default)s: all servers' links are used for every tensor)")
    exchange.add_argument("--seconds", type=rate, default=20, metavar="N", help="how long it is measured (default: %(default)s)")
    exchange.add_argument("--congestion", metavar="NAME", help="TCP's congestion control (default: the system's)")

    for command in (run, exchange):
        command.add_argument("--mbit", type=rate, default=1000, metavar="R", help="rate of a link, each way (default: %(default)s)")
        command.add_argument("--buffer-ms", type=rate, default=10, metavar="N", help="what a port of the switch can hold (default: %(default)s)")
    for command in (run, change_rate, exchange):
        command.add_argument("--json", action="store_true", help="print one JSON object")

    # What comes after `--` is another program's, whatever it looks like.
    own, command = (words, []) if "--" not in words else (words[: words.index("--")], words[words.index("--") + 1 :])
    if own[:1] == ["run"]:
        if not command:
            run.error("give the command after `--`, as in: lab.py run --hosts 2 -- ping -c 1 203.0.113.2")
        arguments = parser.parse_args([*own, "--", *command])
        check_run(run, arguments)
        return arguments
    arguments, further = parser.parse_known_args(words)
    if further and arguments.action is not measure_exchange:
        parser.error(f"unknown: {' '.join(further)}")
    arguments.further = further
    return arguments


def check_run(parser, arguments):
    if arguments.mbit2 is not None and arguments.links < 2:
        parser.error("--mbit2 is of the second link: give --links 2")
    for change in arguments.change:
        if change.host is not None and change.host >= arguments.hosts:
            parser.error(f"--change: host {change.host}: the lab has hosts 0 to {arguments.hosts - 1}")
        if change.link > arguments.links:
            parser.error(f"--change: link {change.link}: the hosts have {arguments.links}")


def hosts(text):
    number = int(text)
    if not 1 <= number <= MAX_HOSTS:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 to {MAX_HOSTS}")
    return number


def rate(text):
    number = float(text)
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return int(number) if number.is_integer() else number


def host_number(text):
    return None if text == "all" else int(text)


class Change:
    """Another rate from some time on."""

    def __init__(self, at_s, host, mbit, link):
        self.at_s, self.host, self.mbit, self.link = at_s, host, mbit, link

    def values(self):
        return {"at_s": self.at_s, "host": "all" if self.host is None else self.host, "link": self.link, "mbit": self.mbit}


def change(text):
    expected = f"{text}: expected at=TIME,host=H,mbit=R, such as at=10s,host=2,mbit=50"
    pairs = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if set(pairs) - {"link"} != {"at", "host", "mbit"} or len(pairs) != len(text.split(",")):
        raise argparse.ArgumentTypeError(expected)
    time_of = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)?", pairs["at"])
    if not time_of:
        raise argparse.ArgumentTypeError(f"at={pairs['at']}: expected a time such as 500ms, 10s or 1m")
    seconds = float(time_of[1]) * {"ms": 1e-3, "s": 1, None: 1, "m": 60}[time_of[2]]
    try:
        host, mbit, link = host_number(pairs["host"]), rate(pairs["mbit"]), int(pairs.get("link", "1"))
    except ValueError:
        raise argparse.ArgumentTypeError(expected) from None
    if (host is not None and host < 0) or link not in (1, 2):
        raise argparse.ArgumentTypeError(expected)
    return Change(seconds, host, mbit, link)


# ---- The lab ----


class Lab:
    """Hosts 0, 1, 2, … as network namespaces, and a namespace with a bridge for each network that joins them."""

    def __init__(self, name, hosts, links=1):
        self.name = name
        self.hosts = hosts
        self.links = links

    @classmethod
    def own(cls, hosts, links=1):
        return cls(f"{PREFIX}{os.getpid()}", hosts, links)

    @property
    def switch(self):
        return f"{self.name}sw"

    def namespace(self, host):
        return f"{self.name}h{host}"

    def address(self, host, link=1):
        return f"{SUBNETS[link - 1]}.{host + 1}"

    def addresses(self, link=1):
        return [self.address(host, link) for host in range(self.hosts)]

    def enter(self):
        """The command that takes others to a host, with {} in place of its number."""
        return f"ip netns exec {self.namespace('{}')}"

    def build(self, mbits, buffer_ms):
        """Makes everything; a rate for each link."""
        sweep()
        run("ip", "netns", "add", self.switch)
        for link in range(1, self.links + 1):
            run("ip", "-n", self.switch, "link", "add", f"br{link}", "type", "bridge")
            run("ip", "-n", self.switch, "link", "set", f"br{link}", "up")
        for host in range(self.hosts):
            namespace = self.namespace(host)
            run("ip", "netns", "add", namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
            for link in range(1, self.links + 1):
                (_, port), (_, device) = self.ends(host, link)
                peer = ["type", "veth", "peer", "name", device, "netns", namespace]
                run("ip", "-n", self.switch, "link", "add", port, *peer)
                run("ip", "-n", self.switch, "link", "set", port, "master", f"br{link}", "up")
                run("ip", "-n", namespace, "address", "add", f"{self.address(host, link)}/24", "dev", device)
                run("ip", "-n", namespace, "link", "set", device, "up")
                self.shape("add", host, link, mbits[link - 1], buffer_ms)

    def ends(self, host, link):
        """Both ends of a link: the switch's and the host's."""
        return (self.switch, f"port{link}-{host}"), (self.namespace(host), f"eth{link - 1}")

    def shape(self, verb, host, link, mbit, buffer_ms):
        for namespace, device in self.ends(host, link):
            shape = ["rate", f"{mbit}mbit", "burst", BURST, "latency", f"{buffer_ms}ms"]
            run("tc", "-n", namespace, "qdisc", verb, "dev", device, "root", "tbf", *shape)

    def set_rate(self, host, link, mbit):
        """Changes the rate of a link, both ways; of all hosts where none is named."""
        for host in range(self.hosts) if host is None else [host]:
            shaper = shapers(self.namespace(host))[f"eth{link - 1}"]
            self.shape("change", host, link, mbit, shaper["options"]["lat"] / 1000)

    def remove(self):
        # A second Ctrl-C must not leave half of it behind.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        remove(self.name)

    def state(self):
        """Of each link: bytes that its shapers have let through from and to its host, and its rate."""
        ports, links = shapers(self.switch), []
        for host in range(self.hosts):
            devices = shapers(self.namespace(host))
            for link in range(1, self.links + 1):
                (_, port), (_, device) = self.ends(host, link)
                links.append({
                    "host": host,
                    "link": link,
                    "mbit": devices[device]["options"]["rate"] * 8 / 1e6,
                    "sent_bytes": devices[device]["bytes"],
                    "received_bytes": ports[port]["bytes"],
                })
        return links

    def device_bytes(self):
        """What the host's end of each first link says in /sys/class/net."""
        files = ["/sys/class/net/eth0/statistics/tx_bytes", "/sys/class/net/eth0/statistics/rx_bytes"]
        read = lambda host: run("ip", "netns", "exec", self.namespace(host), "cat", *files)
        return [tuple(map(int, read(host).split())) for host in range(self.hosts)]


def shapers(namespace):
    """The shaper of every device in a namespace, with its counters."""
    listed = json.loads(run("tc", "-n", namespace, "-s", "-j", "qdisc", "show"))
    return {entry["dev"]: entry for entry in listed if entry["kind"] == "tbf"}


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]


def labs():
    """The names of all labs that are there, and how many hosts each has."""
    found = {}
    for name in namespaces():
        if match := re.fullmatch(rf"({PREFIX}\d+)(sw|h\d+)", name):
            found[match[1]] = found.get(match[1], 0) + (match[2] != "sw")
    return found


def sweep():
    """Removes labs whose script was killed before it could."""
    for name in labs():
        if not os.path.exists(f"/proc/{name.removeprefix(PREFIX)}"):
            remove(name)


def remove(lab):
    own = [name for name in namespaces() if re.fullmatch(rf"{lab}(sw|h\d+)", name)]
    inside = lambda: [int(pid) for name in own for pid in run("ip", "netns", "pids", name).split()]
    deadline, number = time.monotonic() + GRACE_S, signal.SIGTERM
    while pids := inside():
        if time.monotonic() > deadline:
            number = signal.SIGKILL
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    for name in own:
        # Devices go with their namespaces.
        run("ip", "netns", "delete", name)


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ---- lab.py run ----


def run_command(arguments):
    lab = Lab.own(arguments.hosts, arguments.links)
    try:
        lab.build((arguments.mbit, arguments.mbit2 or arguments.mbit), arguments.buffer_ms)
        before, began = lab.state(), time.monotonic()
        changes = Changes(lab, arguments.change)
        changes.start()
        try:
            statuses, failed = Copies(lab, arguments).wait()
        finally:
            changes.stop()
        seconds, after = time.monotonic() - began, lab.state()
    finally:
        lab.remove()
    for link, earlier in zip(after, before):
        for key in ("sent_bytes", "received_bytes"):
            link[key] -= earlier[key]
    # A program that a signal ended has the status that a shell would give it.
    status = 128 - failed if failed < 0 else failed
    report = {"seconds": seconds, "status": status, "statuses": statuses, "links": after, "changes": changes.made}
    show_run(report, arguments.json)
    return status


class Copies:
    """The command, in one host or in all of them."""

    def __init__(self, lab, arguments):
        self.lab, self.each = lab, arguments.each
        # Their output is no part of the report.
        output = sys.stderr if arguments.json else sys.stdout
        self.processes, self.printers = [], []
        for host in range(lab.hosts) if self.each else [0]:
            line = ["ip", "netns", "exec", lab.namespace(host), *(fill_in(lab, host, word) for word in arguments.words)]
            environment = {**os.environ, **variables(lab, host)}
            if not self.each:
                self.processes.append(subprocess.Popen(line, env=environment, stdout=output))
                continue
            process = subprocess.Popen(
                line, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            printer = threading.Thread(target=forward, args=(host, process.stdout, output), daemon=True)
            printer.start()
            self.processes.append(process)
            self.printers.append(printer)

    def wait(self):
        """Waits for all; the first that fails ends the others. Returns their statuses, and the first that is not 0."""
        first = 0
        while True:
            statuses = [process.poll() for process in self.processes]
            failed = [host for host, status in enumerate(statuses) if status]
            if failed and not first:
                first = statuses[failed[0]]
                if self.each:
                    print(f"error: the command failed in host {failed[0]} ({first}); ending the others", file=sys.stderr)
                for process in self.processes:
                    process.terminate()
            if None not in statuses:
                break
            time.sleep(0.05)
        for printer in self.printers:
            printer.join(GRACE_S)
        return statuses, first


def variables(lab, host):
    found = {
        "PARAMILL_LAB_HOST": str(host),
        "PARAMILL_LAB_HOSTS": str(lab.hosts),
        "PARAMILL_LAB_ENTER": lab.enter(),
    }
    for link in range(1, lab.links + 1):
        suffix = "" if link == 1 else str(link)
        found[f"PARAMILL_LAB_ADDRESS{suffix}"] = lab.address(host, link)
        found[f"PARAMILL_LAB_ADDRESSES{suffix}"] = ",".join(lab.addresses(link))
    return found


def fill_in(lab, host, word):
    """A word of the command with what its placeholders stand for; other braces are the command's own."""
    known = {"host": host, "rank": host, "hosts": lab.hosts, "address": lab.address(host), "enter": lab.enter()}
    known["addresses"] = ",".join(lab.addresses())
    known |= {f"address{number}": address for number, address in enumerate(lab.addresses())}
    return re.sub(r"\{(\w+)\}", lambda match: str(known.get(match[1], match[0])), word)


def forward(host, lines, output):
    for line in lines:
        print(f"[host {host}] {line}", end="" if line.endswith("\n") else "\n", file=output, flush=True)


class Changes(threading.Thread):
    """Changes rates at their times."""

    def __init__(self, lab, changes):
        super().__init__(daemon=True)
        self.lab, self.changes = lab, sorted(changes, key=lambda change: change.at_s)
        self.over, self.made = threading.Event(), []

    def run(self):
        began = time.monotonic()
        for change in self.changes:
            if self.over.wait(max(0.0, began + change.at_s - time.monotonic())):
                return
            try:
                self.lab.set_rate(change.host, change.link, change.mbit)
            except subprocess.CalledProcessError as error:
                print(f"error: a rate did not change: {error.stderr.strip()}", file=sys.stderr)
                continue
            self.made.append(change.values())

    def stop(self):
        self.over.set()
        self.join()


def show_run(report, as_json):
    if as_json:
        print(json.dumps(report))
        return
    print(f"{report['seconds']:.1f} s; with the headers of every packet:", file=sys.stderr)
    print(f"{'link':12}{'Mbit/s':>8}{'sent, MB':>12}{'received, MB':>14}", file=sys.stderr)
    for link in report["links"]:
        name = f"host {link['host']}" + (f", {link['link']}" if link["link"] > 1 else "")
        sent, received = link["sent_bytes"] / 1e6, link["received_bytes"] / 1e6
        print(f"{name:12}{link['mbit']:8g}{sent:12.3f}{received:14.3f}", file=sys.stderr)


# ---- lab.py rate ----


def change_running(arguments):
    found = labs()
    if arguments.lab is not None and arguments.lab not in found:
        sys.exit(f"error: no lab is called {arguments.lab}; there are: {', '.join(found) or 'none'}")
    if arguments.lab is None and len(found) != 1:
        sys.exit("error: no lab runs" if not found else f"error: several labs run: {', '.join(found)}; say --lab NAME")
    name = arguments.lab or next(iter(found))
    lab = Lab(name, found[name])
    if arguments.host is not None and not 0 <= arguments.host < lab.hosts:
        sys.exit(f"error: host {arguments.host}: the lab has hosts 0 to {lab.hosts - 1}")
    if f"eth{arguments.link - 1}" not in shapers(lab.namespace(0)):
        sys.exit(f"error: link {arguments.link}: the hosts have one link")
    lab.set_rate(arguments.host, arguments.link, arguments.mbit)
    whose = "all hosts" if arguments.host is None else f"host {arguments.host}"
    report = {"lab": name, "host": "all" if arguments.host is None else arguments.host, "link": arguments.link, "mbit": arguments.mbit}
    print(json.dumps(report) if arguments.json else f"link {arguments.link} of {whose} now has {arguments.mbit} Mbit/s each way")
    return 0


# ---- lab.py exchange ----


def measure_exchange(arguments):
    if not os.access(arguments.paramill, os.X_OK):
        sys.exit(f"error: {arguments.paramill} is no program; build it: cargo build --release")
    lab = Lab.own(arguments.servers + arguments.workers)
    try:
        lab.build((arguments.mbit,), arguments.buffer_ms)
        report = exchange_report(arguments, lab, *exchange(arguments, lab))
    finally:
        lab.remove()
    show_exchange(report, arguments.json)
    return 0


def exchange(arguments, lab):
    """Runs it; returns what the links had carried at many times, and the exchange's own report."""
    command = [
        os.path.abspath(arguments.paramill), "bench", "exchange", "--json", "--quiet",
        "--workers", str(arguments.workers),
        "--servers", str(arguments.servers),
        "--cores", str(arguments.cores),
        "--transport", "tcp",
        "--placement", arguments.placement,
        "--rounds", "1",
        "--seconds", str(arguments.seconds),
        "--run-with", lab.enter(),
    ]
    for server in range(arguments.servers):
        command += ["--host", lab.address(server)]
    if arguments.model:
        command += ["--model", arguments.model]
    if arguments.congestion:
        command += ["--congestion", arguments.congestion]
    count = lambda: {"time": time.monotonic(), "links": lab.state()}
    samples = [count()]
    done = threading.Event()

    def sample():
        while not done.wait(SAMPLE_S):
            samples.append(count())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        process = subprocess.run(command + arguments.further, stdout=subprocess.PIPE, text=True, check=False)
    finally:
        done.set()
        sampler.join()
    if process.returncode != 0:
        sys.exit(f"error: the exchange failed ({process.returncode})")
    samples.append(count())
    return samples, json.loads(process.stdout)


def exchange_report(arguments, lab, samples, found):
    """Rates in the middle of the exchange: between a tenth and nine tenths of all bytes, so that neither the start
    nor the end counts, but every pause in between does."""
    total = lambda sample: sum(link["sent_bytes"] + link["received_bytes"] for link in sample["links"])
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
            "sent_fraction": (after["sent_bytes"] - before["sent_bytes"]) / capacity,
            "received_fraction": (after["received_bytes"] - before["received_bytes"]) / capacity,
        }
        for host, (before, after) in enumerate(zip(first["links"], last["links"]))
    ]
    both_ways = capacity * 2 * lab.hosts
    # Each byte of payload leaves one host and reaches another: it is carried by two links.
    payload = (found["bytes"]["pushed"] + found["bytes"]["pulled"]) * found["iterations_per_s"] * 2 * seconds
    return {
        "model": found["model"],
        "servers": arguments.servers,
        "workers": arguments.workers,
        "codec": found["codec"],
        "answer_codec": found["answer_codec"],
        "mbit_per_link": arguments.mbit,
        "congestion": found.get("congestion"),
        "seconds": seconds,
        "fraction_of_capacity": (total(last) - total(first)) / both_ways,
        "payload_fraction_of_capacity": payload / both_ways,
        "busiest_direction_fraction": max(max(link["sent_fraction"], link["received_fraction"]) for link in links),
        "links": links,
        "device_bytes": [{"sent": sent, "received": received} for sent, received in lab.device_bytes()],
        "goodput_gb_s": found["goodput_gb_s"],
        "bytes": found["bytes"],
        "iterations_per_s": found["iterations_per_s"],
        "iteration_ms": found["iteration_ms"],
    }


def show_exchange(report, as_json):
    if as_json:
        print(json.dumps(report))
        return
    print(
        f"{report['model']}, {report['workers']} workers, {report['servers']} servers, {report['mbit_per_link']} Mbit/s a link "
        f"({report['congestion']}); codec of pushes {report['codec']}, of answers {report['answer_codec']}"
    )
    print(f"{'link':12}{'sent':>8}{'received':>10}")
    for link in report["links"]:
        print(f"{link['host']:12}{link['sent_fraction']:8.1%}{link['received_fraction']:10.1%}")
    print(f"of all links' capacity, both ways: {report['fraction_of_capacity']:.1%}")
    print(f"of it payload:                     {report['payload_fraction_of_capacity']:.1%}")
    sizes = report["bytes"]
    print(
        f"MB an iteration: {sizes['pushed'] / 1e6:.3f} pushed, {sizes['pulled'] / 1e6:.3f} pulled, "
        f"of {sizes['uncompressed'] / 1e6:.3f}"
    )
    print(
        f"goodput {report['goodput_gb_s']:.3f} GB/s, {report['iterations_per_s']:.2f} iterations/s, "
        f"over {report['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
