// What the model server's tests serve: a model that does as its input says.
//
// Compiled, from this folder, by
//     nvcc -ptx -arch=compute_75 -O3 -o kernels.ptx kernels.cu
// and kept exactly as nvcc wrote it.

constexpr unsigned STRAY = 1, ENDLESS = 2, SLOW = 3;

// An item is two numbers, what else to do and a value; its output is value * weights[0] + 1. A thread and a block an item.
extern "C" __global__ void obey(const unsigned* weights, const unsigned* input, unsigned* output, unsigned items)
{
    unsigned item = blockIdx.x;
    if (item >= items) return;
    unsigned what = input[2 * item], value = input[2 * item + 1];
    volatile unsigned* out = output + item;
    if (what == STRAY) *(volatile unsigned*)((char*)output + (1ull << 40)) = value;
    if (what == ENDLESS) while (true) *out = *out + 1;
    unsigned v = value;
#pragma unroll 1
    for (unsigned k = 0; what == SLOW && k < value; k++) v = (v ^ (v >> 7)) * 1664525u + 1013904223u;
    *out = v;
    *out = value * weights[0] + 1;
}
