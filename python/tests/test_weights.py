"""Published weights: what is published is what subscribers have, to the bit, whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import paramill as pm
from paramill import errors

TIMEOUT = 30.0


def weights(seed: int = 1) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    tensors: dict[str, Any] = {f"small{n}": random.normal(size=7).astype(np.float32) for n in range(9)}
    tensors["w"] = random.normal(size=(300, 400)).astype(np.float32)
    tensors["half"] = random.normal(size=(50, 3)).astype(np.float16)
    return tensors


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert got[name].tobytes() == tensor.tobytes(), name


def test_every_version_arrives_whole_and_to_the_bit() -> None:
    tensors = weights()
    with pm.Publisher(tensors, timeout=TIMEOUT) as publisher:
        with pm.Subscriber(publisher.url, torch=False) as first, pm.Subscriber(publisher.url, torch=False) as second:
            for subscriber in (first, second):
                assert_same(subscriber.commit(), tensors)
                assert subscriber.committed == 0
            for version in range(1, 6):
                tensors["w"][version * 3] *= 1.25
                tensors["small4"][2] = -0.0
                tensors["half"][version] += 1
                assert publisher.publish(tensors) == version == publisher.version
                publisher.wait(readers=2)
                assert publisher.readers() == {0: version, 1: version}
                for subscriber in (first, second):
                    assert subscriber.wait() == version
                    assert_same(subscriber.commit(), tensors)


def test_only_what_has_changed_travels() -> None:
    tensors = {"w": np.zeros(1 << 20, np.float32)}
    with pm.Publisher(tensors, timeout=TIMEOUT) as publisher, pm.Subscriber(publisher.url, torch=False) as subscriber:
        subscriber.commit()
        before = subscriber.bytes_received
        assert before == 4 << 20
        tensors["w"][::100] = 1.5
        publisher.wait(publisher.publish(tensors))
        changed = len(tensors["w"][::100])
        assert subscriber.bytes_received - before <= 5.2 * changed
        assert_same(subscriber.commit(), tensors)


def test_a_subscriber_that_comes_late_has_the_newest_version() -> None:
    tensors = weights()
    with pm.Publisher(tensors, timeout=TIMEOUT) as publisher:
        for _ in range(5):
            tensors["w"] += 1
            publisher.publish(tensors)
        with pm.Subscriber(publisher.url, torch=False) as subscriber:
            assert subscriber.wait(5) == 5
            assert_same(subscriber.commit(), tensors)
        assert publisher.publish(tensors) == 6


def test_versions_are_iterated_over_until_the_publisher_ends() -> None:
    tensors = {"w": np.zeros(10, np.float32)}
    publisher = pm.Publisher(tensors, timeout=TIMEOUT)
    with pm.Subscriber(publisher.url, torch=False) as subscriber:
        seen = []
        for version in subscriber:
            seen.append(version)
            subscriber.commit()
            if version < 3:
                tensors["w"] += 1
                publisher.publish(tensors)
            else:
                publisher.close()
        assert seen == [0, 1, 2, 3]
        # What was there stays there.
        assert subscriber.commit()["w"].tolist() == [3.0] * 10


def test_values_are_put_into_what_is_there() -> None:
    tensors = weights()
    into = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    with pm.Publisher(tensors, timeout=TIMEOUT) as publisher, pm.Subscriber(publisher.url, torch=False) as subscriber:
        assert subscriber.commit(into)["w"] is into["w"]
        assert_same(into, tensors)
        with pytest.raises(errors.TableError, match="no place for half"):
            subscriber.commit({name: tensor for name, tensor in into.items() if name != "half"})
        with pytest.raises(errors.ShapeError, match="`w` has the shape"):
            subscriber.commit({**into, "w": np.zeros(3, np.float32)})


def test_what_cannot_be_published_is_refused_and_changes_nothing() -> None:
    tensors = weights()
    with pytest.raises(errors.DtypeError, match="`w` is int64"):
        pm.Publisher({"w": np.zeros(3, np.int64)})
    with pytest.raises(errors.TableError, match="no tensors"):
        pm.Publisher({})
    with pytest.raises(errors.NonFiniteError, match="`w` has NaN or Inf"):
        pm.Publisher({"w": np.full(3, np.nan, np.float32)})
    with pm.Publisher(tensors, timeout=TIMEOUT) as publisher:
        refused = [
            ({**tensors, "more": tensors["w"]}, errors.TableError, "`more` is not one of them"),
            ({name: it for name, it in tensors.items() if name != "w"}, errors.TableError, "`w` is missing"),
            ({**tensors, "w": tensors["w"].astype(np.float16)}, errors.DtypeError, "`w` is f16, and was f32"),
            ({**tensors, "w": tensors["w"][:1]}, errors.ShapeError, "`w` has the shape"),
            ({**tensors, "half": tensors["half"] * np.float16(np.inf)}, errors.NonFiniteError, "NaN or Inf"),
        ]
        for given, error, words in refused:
            with pytest.raises(error, match=words):
                publisher.publish(given)
        assert publisher.version == 0
        assert publisher.publish(tensors) == 1
        with pytest.raises(errors.DeadlineError, match="version 1 is not with 1 subscribers"):
            publisher.wait(timeout=0.1)


def test_the_servers_of_a_job_of_one_worker_hold_what_one_publisher_publishes() -> None:
    tensors = weights()
    with pytest.raises(TypeError, match="`listen` and `cores`: of a server in this process"):
        pm.Publisher(tensors, url="paramill://127.0.0.1:1/weights", listen="127.0.0.1:0", cores=1)
    with pm.Server(workers=1, quiet=True) as server:
        with pm.Publisher(tensors, url=server.url, timeout=TIMEOUT) as publisher:
            with pytest.raises(errors.ParamillError, match="rank 0"):
                pm.Publisher(tensors, url=server.url, timeout=2.0)
            tensors["w"] += 1
            assert publisher.publish(tensors) == 1
            with pm.Subscriber(server.url, torch=False) as subscriber:
                assert subscriber.wait(1) == 1
                assert_same(subscriber.commit(), tensors)


def test_a_job_that_broadcasts_nothing_is_no_publisher() -> None:
    with pm.Server(workers=1, quiet=True) as server, pm.init(server.url) as job:
        job.table("w", init=np.zeros(3, np.float32))
        job.start()
        with pytest.raises(errors.PolicyError, match="table `w` is not broadcast"):
            pm.Subscriber(server.url, timeout=TIMEOUT)


def test_training_can_be_read() -> None:
    with pm.Server(workers=1, quiet=True, broadcast="star", answer_codec="delta:dtype=bf16") as server:
        with pm.init(server.url) as job:
            table = job.table("w", init=np.ones(100, np.float32), optimizer="sgd:lr=0.5")
            job.start()
            with pm.Subscriber(server.url, torch=False, timeout=TIMEOUT) as subscriber:
                for step in range(1, 4):
                    table.update(np.full(100, 0.3, np.float32))
                    job.clock()
                    table.sync()
                    assert subscriber.wait(step) == step
                    assert subscriber.commit()["w"].tolist() == table.values.tolist()


SUBSCRIBER = """
import sys, paramill as pm
with pm.Subscriber(sys.argv[1], torch=False) as subscriber:
    for version in subscriber:
        print(version, subscriber.commit()["w"].tobytes().hex(), flush=True)
"""


def test_a_subscriber_that_is_killed_holds_nobody_up_and_catches_up() -> None:
    tensors = {"w": np.arange(1000, dtype=np.float32)}
    with pm.Publisher(tensors, timeout=TIMEOUT) as publisher:
        for round in range(3):
            process = subprocess.Popen(
                [sys.executable, "-c", SUBSCRIBER, publisher.url], stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            for _ in range(2):
                tensors["w"][round] += 1
                version = publisher.publish(tensors)
                while True:
                    number, values = process.stdout.readline().split()
                    if int(number) == version:
                        break
                assert bytes.fromhex(values) == tensors["w"].tobytes()
            process.send_signal(signal.SIGKILL)
            process.wait()


def read_safetensors(path: str) -> tuple[dict[str, str], dict[str, Any]]:
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        body = file.read()
    types = {"F32": np.float32, "F16": np.float16}
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(body[start:end], types[entry["dtype"]]).reshape(entry["shape"])
    return metadata, tensors


def test_the_command_keeps_the_newest_version_in_a_file(tmp_path: Any, command: str) -> None:
    tensors, out = weights(), tmp_path / "model.safetensors"
    with pm.Publisher(tensors, timeout=TIMEOUT) as publisher:
        once = [command, "subscribe", publisher.url, "--out", str(out), "--once", "--json"]
        told = json.loads(subprocess.run(once, check=True, capture_output=True, text=True).stdout)
        assert told["version"] == 0 and told["bytes"] == os.path.getsize(out)
        process = subprocess.Popen([*once[:-2], "--json"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["version"] == 0
        tensors["w"] *= 2
        publisher.publish(tensors)
        assert json.loads(process.stdout.readline())["version"] == 1
        metadata, kept = read_safetensors(str(out))
        assert metadata["version"] == "1" and metadata["job"] == publisher.url
        assert_same(kept, tensors)
        process.terminate()
        assert process.wait(10) == 0
        assert os.listdir(tmp_path) == ["model.safetensors"]


def test_torch_tensors_on_both_ends() -> None:
    torch = pytest.importorskip("torch")
    model = {"a": torch.randn(200, 30).bfloat16(), "b": torch.randn(11).half(), "c": torch.randn(4)}
    with pm.Publisher(model, timeout=TIMEOUT) as publisher, pm.Subscriber(publisher.url, torch=True) as subscriber:
        for version in range(4):
            if version:
                model["a"][version] *= 2
                model["c"] += 1
                publisher.wait(publisher.publish(model))
            got = subscriber.commit()
            for name, tensor in model.items():
                assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
        layer = torch.nn.Linear(30, 200, bias=False)
        with torch.no_grad():
            module = {"a": layer.weight, "b": torch.zeros(11), "c": torch.zeros(4)}
            subscriber.commit(module)
        assert torch.equal(layer.weight.data, model["a"].float())


def test_a_commit_is_the_callers_own() -> None:
    tensors = {"w": np.zeros(5, np.float32)}
    with pm.Publisher(tensors, timeout=TIMEOUT) as publisher, pm.Subscriber(publisher.url, torch=False) as subscriber:
        mine = subscriber.commit()["w"]
        mine += 7
        assert subscriber.commit()["w"].tolist() == [0.0] * 5
        with pytest.raises(errors.DeadlineError, match="version 1 of all tables"):
            subscriber.wait(timeout=0.2)
