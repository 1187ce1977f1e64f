// The example's classifier of 8 x 8 pixels: one hidden layer with a rectifier, ten scores.
//
// Compiled, from this folder, by
//     nvcc -ptx -arch=compute_75 -O3 -o digits.ptx digits.cu
// and kept exactly as nvcc wrote it.

constexpr unsigned PIXELS = 64;
constexpr unsigned DIGITS = 10;
constexpr unsigned MAX_HIDDEN = 128;

// A block an item, of at least PIXELS threads. Weights, in this order and row by row: PIXELS x hidden, hidden,
// hidden x DIGITS, DIGITS.
extern "C" __global__ void digits(const float* __restrict__ weights, const float* __restrict__ input,
                                  float* __restrict__ output, unsigned items, unsigned hidden)
{
    __shared__ float pixels[PIXELS], units[MAX_HIDDEN];
    unsigned item = blockIdx.x, t = threadIdx.x;
    if (item >= items || hidden > MAX_HIDDEN) return;
    if (t < PIXELS) pixels[t] = input[item * PIXELS + t];
    __syncthreads();
    const float* bias = weights + PIXELS * hidden;
    for (unsigned unit = t; unit < hidden; unit += blockDim.x) {
        float sum = bias[unit];
        for (unsigned k = 0; k < PIXELS; k++) sum += pixels[k] * weights[k * hidden + unit];
        units[unit] = sum > 0.0f ? sum : 0.0f;
    }
    __syncthreads();
    const float* last = bias + hidden;
    for (unsigned digit = t; digit < DIGITS; digit += blockDim.x) {
        float sum = last[hidden * DIGITS + digit];
        for (unsigned unit = 0; unit < hidden; unit++) sum += units[unit] * last[unit * DIGITS + digit];
        output[item * DIGITS + digit] = sum;
    }
}
