// Parameters that came as halves become floats on the GPU. `halves.ptx` is made of this file by `python bench/gpu/compile.py`.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

const u32 THREADS = 256;
const u32 BF16 = 2;

__device__ float widened(u16 half, u32 kind) {
    if (kind == BF16) return __uint_as_float((u32)half << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

// `kind` is in the host's memory, and known when the halves are here: 1 for f16, 2 for bf16, 0 where there are none.
extern "C" __global__ void halves_widen(const u16* halves, float* values, u64 count, const volatile u32* kind) {
    __shared__ u32 own;
    if (threadIdx.x == 0) own = *kind;
    __syncthreads();
    if (own == 0) return;
    const u64 all = (u64)gridDim.x * THREADS;
    for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < count; at += all) values[at] = widened(halves[at], own);
}
