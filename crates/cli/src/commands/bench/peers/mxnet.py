# MXNet KVStore `dist_sync`: workers push gradients and pull values. When all have pushed, servers make an SGD step, or
# without one the sum of the gradients becomes the value, which is less work. Servers and the scheduler do their work in
# the import, as the environment tells them to, and end there.

import os
import sys
import zlib


def main():
    mine = part()
    os.environ["DMLC_ROLE"] = mine["role"]
    import mxnet as mx

    if mine["role"] != "worker":
        sys.exit("mxnet came back from being a " + mine["role"])
    store = mx.kv.create("dist_sync")
    if mine["step"]:
        store.set_optimizer(mx.optimizer.SGD(learning_rate=mine["lr"], rescale_grad=1.0 / mine["workers"]))
    keys = list(range(len(mine["shapes"])))
    values = [mx.nd.full(tuple(shape), 0.5) for shape in mine["shapes"]]
    gradients = [mx.nd.full(tuple(shape), 0.001 * (mine["rank"] + 1)) for shape in mine["shapes"]]
    store.init(keys, values)
    mx.nd.waitall()

    def iterate():
        store.push(keys, gradients)
        store.pull(keys, out=values)
        mx.nd.waitall()

    def checksum():
        first = values[0].asnumpy()
        assert (first != 0.5).all(), "mxnet did not move the parameters"
        return zlib.crc32(first.tobytes())

    obey(iterate, checksum)


main()
