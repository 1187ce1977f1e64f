"""The embedded driver's limits, and the error for an image that exceeds one.

A tenant writes the PTX, so everything that a tenant can make large has a limit. Names contain the units.
"""

from gpulease.daemon.drivers.interface import ImageRejected


def rejected(reason: str, *, line: int = 0, text: str = "", kernel: str = "", hint: str = "") -> ImageRejected:
    """Return the error for an image. `text` is the source of line `line`, and `kernel` the name of its function."""
    # The message has the source in one line.
    excerpt = " ".join(text.split())[:200]
    place = f" of kernel {kernel}" if kernel else ""
    position = f"line {line}{place}: " if line else ""
    log = f"{position}{reason}" + (f"\n    {excerpt}" if excerpt else "")
    message = f"{position}{reason}" + (f": {excerpt}" if excerpt else "")
    return ImageRejected(message, log=log, line=line, hint=hint)


# --- PTX text --------------------------------------------------------------------------------------------------

# Bytes of an image. Longer texts would take seconds to scan before any other limit applies. nvcc's largest kernels have
# a few MB.
MAX_IMAGE_BYTES = 16 * 1024 * 1024

# Depth of blocks within blocks, for texts like "{{{{".
MAX_BLOCK_DEPTH = 64

# Registers of one declaration, such as `%r<999999999>`. No real kernel has as many.
MAX_REGISTERS_PER_RANGE = 1 << 20

# Instructions of one kernel. To compile this many generic accesses, the worst case, takes 13 s and 1.7 GB.
MAX_INSTRUCTIONS = 1 << 15

# Instructions of all kernels and functions of an image. Each is an object of about 700 bytes while the image is loaded.
MAX_IMAGE_INSTRUCTIONS = 1 << 17

# Instructions of a kernel up to which functions whose loops watch memory are inlined. Each such loop saves the
# registers that are live in it, so a larger kernel could exceed the limit on saved registers. In a larger kernel the
# functions are called.
MAX_WATCHING_INSTRUCTIONS = 8192

# Functions of an image. Each takes a compiled function and a table entry.
MAX_FUNCTIONS = 4096

# Registers that occur in a function. Each becomes a stack slot before optimisation.
MAX_REGISTERS_PER_FUNCTION = 1 << 16

# Characters of one number, because Python's int() takes quadratic time. 64 binary digits and a prefix fit.
MAX_NUMBER_CHARACTERS = 80

# Initialisers written out in the text of an image. Each is a Python object while the image is parsed.
MAX_INITIALISERS = 1 << 20

# Operands of one instruction. The widest real one (mma) has fewer than 40.
MAX_OPERANDS = 64

# Bits of the liveness analysis of a kernel with barriers: registers times blocks. This many are 32 MiB.
MAX_LIVENESS_BITS = 1 << 28

# Visits of blocks during the liveness analysis. Real kernels need a few for each block; a hostile kernel can need
# millions.
MAX_LIVENESS_VISITS = 1 << 20

# Values that LLVM merges where paths join, in one function. Each takes about 4 KB and 10 us. A text of 100 KB with 1000
# registers that are live in all of 1000 blocks has a million such values. Large real kernels have about 10,000.
MAX_MERGES = 1 << 18

# Lines of IR of a kernel and its functions, or of kernels with functions in common. A generic access has 54 lines, so
# MAX_INSTRUCTIONS of them fit. An addition of a vector to memory has 267.
MAX_IR_LINES = 1_800_000

# Lines of IR of all kernels of an image, which take memory and time when the image is loaded.
MAX_IMAGE_IR_LINES = 2 * MAX_IR_LINES

# Checked accesses and instructions up to which a kernel is optimised. The time to optimise grows with the square of the
# accesses: 256 in a loop take 2 s, and 4000 took minutes and gigabytes. Larger kernels are compiled without
# optimisation, in linear time. Kernels of an image that call functions are compiled together, so for them the sum
# counts.
MAX_OPTIMISED_ACCESSES = 192
MAX_OPTIMISED_INSTRUCTIONS = 4096
MAX_OPTIMISED_CALLING_ACCESSES = 2048

# Accesses up to which a kernel that calls no function is at least simplified. 1024 take 3 to 5 s, and 4000 took 36 s.
MAX_SIMPLIFIED_ACCESSES = 1024

# Lines of IR up to which a kernel is optimised. LLVM's time to select and order a block's instructions grows with the
# square of their number. 260,000 lines of matrix products took 27 s, and 3 s without optimisation, with code that is
# four fifths as fast.
MAX_OPTIMISED_LINES = 200_000

# A kernel is first compiled quickly, to code that runs up to four times as long. When its launches have run for this
# time in the first code, the kernel is optimised before its next launch. The optimisation takes about the same time, so
# a kernel takes at most twice as long as if it had been optimised at once. FIRST_CODE_NS is the minimum. The other two
# are per byte of compressed IR: to optimise kernels of 58 to 300 KB took 12 to 50 us a byte on a busy host, and half of
# that on an idle one. Kernels of 350 to 880 KB that are only simplified took 5 to 12 us a byte on a busy host.
FIRST_CODE_NS = 100_000_000
FIRST_CODE_NS_PER_BYTE = 25_000
FIRST_CODE_NS_PER_SIMPLIFIED_BYTE = 7_000

# Threads of a launch from which a kernel is optimised at once. A million threads in the first code take as long as the
# optimisation.
MAX_FIRST_CODE_THREADS = 1 << 20

# Functions that an optimised kernel may reach. The optimiser follows calls, and a chain of 2000 takes minutes.
MAX_OPTIMISED_FUNCTIONS = 128

# Steps along calls to find the functions that each kernel reaches. A hostile image could require kernels times
# functions of them.
MAX_CALL_GRAPH_STEPS = 1 << 19

# Bytes of the .param variables of all calls in one function. Before optimisation, all of them are in the function's
# frame.
MAX_CALL_BYTES = 1 << 18

# Labels of one .branchtargets, or functions of one .calltargets. An indexed branch has all labels of its list as
# operands, so the labels also count as instructions.
MAX_LISTED = 1 << 12

# --- Compiled images -------------------------------------------------------------------------------------------

# Bytes of compressed IR and object code that a process caches after its modules are gone.
MAX_HELD_CODE_BYTES = 64 << 20

# --- Calls -----------------------------------------------------------------------------------------------------

# Bytes of native stack that a thread's calls may use, and of the stack of the host thread that runs them. A function
# checks that its frame fits into the first. The second has additional room for one frame of maximum size.
MAX_CALL_STACK_BYTES = 16 << 20
STREAM_STACK_BYTES = 32 << 20

# Maximum number of bytes of a function's frame per line of IR, for spilled values; in optimised code, these may be
# vectors.
FRAME_BYTES_PER_LINE = 16
OPTIMISED_FRAME_BYTES_PER_LINE = 256
MAX_FRAME_BYTES = 8 << 20

# --- A kernel's resources --------------------------------------------------------------------------------------

# PTX ISA section 5.1.6.1, "Kernel Function Parameters": 32764 bytes from PTX 8.1 and sm_70 on, 4352 before. The queue
# has room for that many in each slot, but only the pages that are written take memory.
MAX_PARAMETER_BYTES = 32_764
MAX_OLD_PARAMETER_BYTES = 4352

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
MAX_THREADS_PER_BLOCK = 1024
MAX_BLOCK_DIMS = (1024, 1024, 64)
MAX_GRID_DIMS = (2**31 - 1, 65535, 65535)

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": the maximum for a kernel's variables,
# and the maximum for a block on a 9.0 card, including dynamic shared memory.
MAX_STATIC_SHARED_BYTES = 48 * 1024
MAX_SHARED_BYTES = 227 * 1024

# Bytes of local memory of a thread. A card allows 512 KiB, but then 1024 threads would have 512 MiB outside the slice.
MAX_LOCAL_BYTES = 64 * 1024

# Maximum number of bytes that a running function may allocate on its stack with alloca. A card's default for a thread's
# whole stack is 1 KiB, and each of a block's thousand threads has a stack.
MAX_STACK_BYTES = 16 << 10

# Registers that a thread keeps across a barrier. 2048 registers of 8 bytes are 16 MiB per block. A card has 255
# registers per thread, and spills the rest.
MAX_LIVE_REGISTERS = 2048

# Registers saved and restored at all waits of a kernel together. Each takes four lines of IR, so thousands of barriers
# with thousands of live registers would take gigabytes. This many take 15 s to compile. Kernels with many matrix
# products have up to 256 live registers at each of hundreds of waits.
MAX_SAVED_REGISTERS = 250_000

# Instructions and lines of IR up to which a kernel is compiled for lanes. Code for lanes takes up to three times as
# long to compile, at this length nine seconds in the worst case. nvcc's unrolled loops have less than a sixth of this
# length. Triton's matrix products and attention, and stencils of nine planes, have nearly all of it.
MAX_LANE_INSTRUCTIONS = 2048
MAX_LANE_LINES = 40_000

# Accesses and waits up to which a kernel is compiled for lanes. Its code is optimised without the passes whose time
# grows with the square of this number.
MAX_LANE_ACCESSES = 384

# Basic blocks up to which a kernel is compiled for lanes. Each block has a mask that is kept through all other blocks.
# 64 blocks that jump back take 0.2 s to compile, 128 blocks 1 s, and 250 blocks minutes. nvcc's kernels have tens of
# blocks, of which few separate the lanes.
MAX_LANE_BLOCKS = 128

# Registers that threads in lanes save and restore at all barriers together. Each save and each restore is a line or two
# of IR.
MAX_LANE_SAVED_REGISTERS = 4096

# Bytes that a group of threads in lanes keeps at a barrier. A block with rows of one thread has 1024 groups.
MAX_LANE_FRAME_BYTES = 8 * MAX_LIVE_REGISTERS

# --- Printing --------------------------------------------------------------------------------------------------

# Bytes of a module's heap for malloc in kernels, as in CUDA. The heap counts against the slice.
HEAP_BYTES = 8 << 20

# Bytes that kernels may print between two waits, both as records and as text. It is the default size of CUDA's buffer.
MAX_PRINT_BYTES = 1 << 20

# Maximum number of bytes of one format or one string.
MAX_PRINT_TEXT = 4096

# Maximum number of bytes of each text of a failed assertion.
MAX_ASSERTION_TEXT = 512

# A field's width or precision. `%2000000000d` would print 2 GB.
MAX_PRINT_WIDTH = 1024

# --- Blocks on several cores -----------------------------------------------------------------------------------

# Host threads that run blocks. Each has a stack, and few kernels could use more threads.
MAX_HOST_THREADS = 64

# Blocks that run at a time, so that they may wait for one another: about 8 for each multiprocessor of a large card. The
# parts of their areas that they touch are host memory outside of any slice, so these have separate bounds: room for
# four blocks with the maximum local memory, and for 215 blocks with the maximum shared memory (a large card has room
# for 132 of these).
MAX_RESIDENT_BLOCKS = 1024
RESIDENT_SHARED_BYTES = 48 << 20
RESIDENT_LOCAL_BYTES = 256 << 20
RESIDENT_FRAME_BYTES = 80 << 20

# CHUNKS_PER_THREAD is the number of chunks of a launch for each thread, so that all threads end at about the same time.
# A chunk has at most MAX_CHUNK_BLOCKS blocks, so that the other threads stop soon after a fault.
CHUNKS_PER_THREAD = 16
MAX_CHUNK_BLOCKS = 64

# Remaining nanoseconds of a launch from which sleeping threads are woken. To wake a thread costs about 5 us, and the
# thread starts to work after another 5 us.
WAKE_NS = 20_000

# Number of times that an idle thread polls for work before it sleeps. After each poll it yields the core, which takes
# about 0.3 us.
HELPER_YIELDS = 64

# --- The stream ------------------------------------------------------------------------------------------------

# Launches that can be queued before `launch` waits. They take longer than a thread takes to wake up, but end soon.
QUEUE_DEPTH = 1024

# Seconds for which a waiter polls the counter before it sleeps. A small kernel takes less.
SPIN_S = 50e-6

# Interval at which a sleeping waiter wakes up to poll, in nanoseconds.
POLL_INTERVAL_NS = 1_000_000

# Number of times that the stream's thread polls for work before it sleeps. Each poll takes about 40 ns.
IDLE_SPINS = 512

# Seconds for which `close` waits for a running kernel. After that the kernel ends with the process.
CLOSE_WAIT_S = 0.2
