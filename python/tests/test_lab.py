"""`bench/lab.py`: what is typed is understood or refused, rates change while it runs, and nothing is left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LAB = Path(__file__).parents[2] / "bench/lab.py"
DEADLINE_S = 60


def load() -> Any:
    spec = importlib.util.spec_from_file_location("lab", LAB)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lab = load()


def can_build() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return False
    name = f"plabtest{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    tbf = "qdisc add dev lo root tbf rate 1mbit burst 128kb latency 10ms".split()
    shaped = subprocess.run(["tc", "-n", name, *tbf], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return shaped


needs_namespaces = pytest.mark.skipif(not can_build(), reason="needs root, ip, tc and network namespaces")


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as refused:
        lab.parse_arguments(list(words))
    assert refused.value.code == 2
    return capsys.readouterr().err


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def test_what_is_typed_is_understood() -> None:
    arguments = lab.parse_arguments(
        "run --hosts 3 --mbit 100 --links 2 --mbit2 0.5 --change at=500ms,host=2,mbit=50 --change at=1m,host=all,mbit=2,link=2"
        " --each -- tool --json --hosts {hosts}".split()
    )
    assert (arguments.hosts, arguments.mbit, arguments.mbit2, arguments.each) == (3, 100, 0.5, True)
    assert arguments.words == ["tool", "--json", "--hosts", "{hosts}"] and not arguments.json
    assert [change.values() for change in arguments.change] == [
        {"at_s": 0.5, "host": 2, "link": 1, "mbit": 50},
        {"at_s": 60, "host": "all", "link": 2, "mbit": 2},
    ]
    assert lab.parse_arguments(["exchange", "--codec", "f16"]).further == ["--codec", "f16"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("run --hosts 2", "give the command after `--`"),
        ("run --hosts 0 -- true", "expected 1 to 250"),
        ("run --hosts 2 --mbit 0 -- true", "expected a number above 0"),
        ("run --hosts 2 --mbit2 5 -- true", "give --links 2"),
        ("run --hosts 2 --change at=1s,host=2,mbit=5 -- true", "the lab has hosts 0 to 1"),
        ("run --hosts 2 --change at=1s,host=1,mbit=5,link=2 -- true", "the hosts have 1"),
        ("run --hosts 2 --change at=1s,host=1 -- true", "expected at=TIME,host=H,mbit=R"),
        ("run --hosts 2 --change at=soon,host=1,mbit=5 -- true", "expected a time such as 500ms"),
        ("rate 2 50 80", "unknown: 80"),
    ],
)
def test_what_cannot_be_built_is_refused(capsys: pytest.CaptureFixture[str], line: str, why: str) -> None:
    assert why in refusal(capsys, *line.split())


def test_placeholders_are_filled_in_and_other_braces_stay() -> None:
    hosts = lab.Lab("plab7", 2, 2)
    assert lab.fill_in(hosts, 1, "{rank}/{hosts} {address} {address0} {addresses}") == (
        "1/2 203.0.113.2 203.0.113.1 203.0.113.1,203.0.113.2"
    )
    assert lab.fill_in(hosts, 1, "{enter} {} {x}") == "ip netns exec plab7h{} {} {x}"
    variables = lab.variables(hosts, 1)
    assert variables["PARAMILL_LAB_HOST"] == "1" and variables["PARAMILL_LAB_ENTER"] == "ip netns exec plab7h{}"
    assert variables["PARAMILL_LAB_ADDRESS2"] == "198.51.100.2"
    assert variables["PARAMILL_LAB_ADDRESSES2"] == "198.51.100.1,198.51.100.2"


def test_without_the_tools_the_remedy_is_named(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, which is asked for first")
    line = [sys.executable, str(LAB), "run", "--hosts", "2", "--", "true"]
    ended = subprocess.run(line, capture_output=True, text=True, env={"PATH": str(tmp_path)}, timeout=DEADLINE_S)
    assert ended.returncode == 1 and "apt-get install iproute2" in ended.stderr


SEND = """
import os, socket, sys
host, count = int(os.environ["PARAMILL_LAB_HOST"]), 200_000
other = os.environ["PARAMILL_LAB_ADDRESSES2"].split(",")[1]
if host == 1:
    with socket.create_server((other, 7)) as listener:
        connection, _ = listener.accept()
        received = 0
        while piece := connection.recv(65536):
            received += len(piece)
    sys.exit(received != count)
while True:
    try:
        connection = socket.create_connection((other, 7))
        break
    except ConnectionRefusedError:
        pass
connection.sendall(bytes(count))
connection.close()
"""


@needs_namespaces
def test_hosts_reach_each_other_over_the_second_link_and_bytes_are_counted() -> None:
    line = [sys.executable, str(LAB), "run", "--hosts", "2", "--links", "2", "--mbit2", "100", "--each", "--json", "--"]
    ended = subprocess.run([*line, sys.executable, "-c", SEND], capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["statuses"] == [0, 0]
    links = {(link["host"], link["link"]): link for link in report["links"]}
    assert links[0, 2]["sent_bytes"] > 200_000 and links[1, 2]["received_bytes"] > 200_000
    assert links[0, 1]["sent_bytes"] < 200_000 and links[1, 2]["sent_bytes"] < 200_000
    assert (links[0, 1]["mbit"], links[0, 2]["mbit"]) == (1000, 100)


@needs_namespaces
def test_rates_change_at_their_times_and_the_first_failure_ends_all() -> None:
    # Host 1 ends when its link has the new rate; host 0 would wait for ever.
    words = "test {host} = 0 && exec sleep 1000; until tc qdisc show dev eth0 | grep -q 7Mbit; do sleep 0.05; done; exit 3"
    line = [sys.executable, str(LAB), "run", "--hosts", "2", "--each", "--change", "at=100ms,host=1,mbit=7", "--json"]
    process = subprocess.Popen([*line, "--", "sh", "-c", words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3 and "failed in host 1 (3)" in err
    report = json.loads(out)
    assert report["changes"] == [{"at_s": 0.1, "host": 1, "link": 1, "mbit": 7}]
    assert [link["mbit"] for link in report["links"]] == [1000, 7]
    assert not [name for name in namespaces() if name.startswith(f"plab{process.pid}")]


@needs_namespaces
def test_a_running_lab_takes_another_rate_and_ctrl_c_leaves_nothing() -> None:
    line = [sys.executable, str(LAB), "run", "--hosts", "2", "--", "sh", "-c", "echo up; exec sleep 1000"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "up\n"
    name = f"plab{process.pid}"
    change = [sys.executable, str(LAB), "rate", "all", "5", "--lab", name, "--json"]
    answer = json.loads(subprocess.run(change, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout)
    assert answer == {"lab": name, "host": "all", "link": 1, "mbit": 5}
    for namespace, device in ((f"{name}h1", "eth0"), (f"{name}sw", "port1-0")):
        shown = subprocess.run(["tc", "-n", namespace, "qdisc", "show", "dev", device], capture_output=True, text=True)
        assert "rate 5Mbit" in shown.stdout and "lat 10ms" in shown.stdout
    beyond = subprocess.run([*change[:3], "2", "5", "--lab", name], capture_output=True, text=True)
    assert beyond.returncode == 1 and "the lab has hosts 0 to 1" in beyond.stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    assert not [left for left in namespaces() if left.startswith(name)]
