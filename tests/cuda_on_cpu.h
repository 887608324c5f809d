// Runs CUDA kernels on the CPU, to test row programs without a GPU. In place of machine.cuh and exchange.cuh
// (jaxnorm/_rows) this header offers their functions, and the part of CUDA C++ that functions.cuh and kernels use. tests/row_emulator.py compiles and
// calls.
//
// All threads of a cluster's blocks are fibers of one CPU thread. A fiber runs until it waits for other threads, so a
// missing barrier shows as a wrong result; which fiber goes on first depends on the order (forward, reverse, random).
// Errors end a launch with a message: threads that wait for each other for ever, barriers that threads reach at
// different places, misaligned addresses, reads outside of the operands, bulk copies against the rules.
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmath>
#include <type_traits>
#include <utility>

typedef unsigned u32;
typedef unsigned long long u64;
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __shared__ static __attribute__((section("static_shared"), unused))
#define DEVICE static inline
#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif

struct uint2 {
  u32 x, y;
} __align__(8);
struct uint3 {
  u32 x, y, z;
};
struct uint4 {
  u32 x, y, z, w;
} __align__(16);
struct int2 {
  int x, y;
} __align__(8);
struct int4 {
  int x, y, z, w;
} __align__(16);
struct float2 {
  float x, y;
} __align__(8);
struct float4 {
  float x, y, z, w;
} __align__(16);
struct double2 {
  double x, y;
} __align__(16);
DEVICE uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
DEVICE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
DEVICE int2 make_int2(int x, int y) { return {x, y}; }
DEVICE int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
DEVICE float2 make_float2(float x, float y) { return {x, y}; }
DEVICE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
DEVICE double2 make_double2(double x, double y) { return {x, y}; }

// ---- the emulator ----

namespace emulator {

struct Buffer {
  char* begin;
  u64 bytes;
};
struct Launch {
  u32 grid[3], block[3];
  u32 cluster, shared_bytes;
  const Buffer* buffers;  // all memory that kernels may read
  u32 buffer_count;
  const char* kinds;  // of the arguments, a letter each: p a pointer, l long long, i int; or * for any
  void* const* arguments;
  u32 order;       // 0: one of the others, depending on the cluster. 1: forward, 2: reverse, 3: random
  double seconds;  // a launch that takes longer is an error
};

struct Block;
struct Thread {
  void* stack_pointer;
  uint3 index;
  Block* block;
  u32 number;         // in the block
  const char* waits;  // for what, or null
  int line;           // of the call that waits
  u32 mask;           // lanes that take part in what the warp does together
  int source;         // the lane whose value this one takes
  u64 value, result;  // what this lane offers, what it gets
  bool ended;
};
struct Block {
  uint3 index;
  u32 rank, waiting, ended;
  char* shared;
};

enum class Exchange { kNothing, kShuffle, kBallot };

extern Thread* current;
extern uint3 block_size, grid_size;
extern const Launch* launch;
extern u32 last_buffer;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void block_sync(int line);
u64 warp_exchange(Exchange exchange, const char* what, int line, u32 mask, u64 value, int source);
void check_read(const void* from, u64 bytes, u64 alignment, const char* what);
const char* run(const Launch& launch, void (*body)(const void*), const void* kernel);

template <class T>
static inline u64 to_bits(T value) {
  u64 bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T, class From>
static inline T from_bits(From bits) {
  static_assert(sizeof(T) <= sizeof(From));
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
static inline auto shuffle(const char* what, int line, u32 mask, T value, int source) {
  using Promoted = decltype(+value);
  return from_bits<Promoted>(warp_exchange(Exchange::kShuffle, what, line, mask, to_bits<Promoted>(value), source));
}
static inline int lane() { return (int)(current->number % 32); }

template <class P>
static constexpr char kind_of() {
  return std::is_pointer_v<P> ? 'p' : std::is_same_v<P, long long> ? 'l' : std::is_same_v<P, int> ? 'i' : '?';
}
template <class... P, size_t... I>
static void call(void (*kernel)(P...), std::index_sequence<I...>) {
  kernel(*(std::remove_const_t<P>*)launch->arguments[I]...);
}
template <class... P>
static const char* run_kernel(void (*kernel)(P...), const Launch& launch) {
  static const char kinds[] = {kind_of<P>()..., 0};
  if (strcmp(launch.kinds, "*") && strcmp(kinds, launch.kinds)) {
    static char message[512];
    const char* text = "the kernel's parameters are %.200s, the call passes %.200s (p pointer, l long long, i int)";
    __builtin_snprintf(message, sizeof message, text, kinds, launch.kinds);
    return message;
  }
  return run(
      launch, [](const void* f) { call((void (*)(P...))f, std::index_sequence_for<P...>()); }, (const void*)kernel);
}

}  // namespace emulator

#define EMULATE(kernel)                                                                                            \
  extern "C" __attribute__((visibility("default"))) const char* emulate_##kernel(const emulator::Launch* launch) { \
    return emulator::run_kernel(kernel, *launch);                                                                  \
  }

// ---- CUDA's built-ins ----

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current->block->index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)
constexpr int warpSize = 32;

DEVICE void __syncthreads(int line = __builtin_LINE()) { emulator::block_sync(line); }
DEVICE void __syncwarp(u32 mask = ~0u, int line = __builtin_LINE()) {
  emulator::warp_exchange(emulator::Exchange::kNothing, "__syncwarp", line, mask, 0, 0);
}
DEVICE void __threadfence() {}
DEVICE void __threadfence_block() {}
DEVICE u32 __ballot_sync(u32 mask, int predicate, int line = __builtin_LINE()) {
  return (u32)emulator::warp_exchange(emulator::Exchange::kBallot, "__ballot_sync", line, mask, predicate != 0, 0);
}
DEVICE int __any_sync(u32 mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) != 0;
}
DEVICE int __all_sync(u32 mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) == mask;
}
// A lane whose source lies outside of its `width` lanes keeps its own value.
template <class T>
static auto __shfl_sync(u32 mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  const int first = emulator::lane() & ~(width - 1);
  return emulator::shuffle("__shfl_sync", line, mask, value, first + (source & (width - 1)));
}
template <class T>
static auto __shfl_xor_sync(u32 mask, T value, int distance, int width = 32, int line = __builtin_LINE()) {
  const int lane = emulator::lane(), source = lane ^ distance;
  return emulator::shuffle("__shfl_xor_sync", line, mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <class T>
static auto __shfl_down_sync(u32 mask, T value, int distance, int width = 32, int line = __builtin_LINE()) {
  const int lane = emulator::lane(), source = lane + distance;
  return emulator::shuffle("__shfl_down_sync", line, mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <class T>
static auto __shfl_up_sync(u32 mask, T value, int distance, int width = 32, int line = __builtin_LINE()) {
  const int lane = emulator::lane(), source = lane - distance;
  return emulator::shuffle("__shfl_up_sync", line, mask, value, source < (lane & ~(width - 1)) ? lane : source);
}

template <class T>
static T __ldg(const T* from) {
  emulator::check_read(from, sizeof(T), alignof(T), "__ldg");
  return *from;
}
template <class T>
static T __ldcs(const T* from) {
  emulator::check_read(from, sizeof(T), alignof(T), "__ldcs");
  return *from;
}
template <class T>
static T __ldcg(const T* from) {
  emulator::check_read(from, sizeof(T), alignof(T), "__ldcg");
  return *from;
}
template <class T>
static void __stcs(T* to, T value) {
  *to = value;
}
template <class T>
static void __stcg(T* to, T value) {
  *to = value;
}

DEVICE float __uint_as_float(u32 x) { return emulator::from_bits<float>(x); }
DEVICE float __int_as_float(int x) { return emulator::from_bits<float>(x); }
DEVICE u32 __float_as_uint(float x) { return emulator::from_bits<u32>(x); }
DEVICE int __float_as_int(float x) { return emulator::from_bits<int>(x); }
DEVICE double __longlong_as_double(long long x) { return emulator::from_bits<double>(x); }
DEVICE long long __double_as_longlong(double x) { return emulator::from_bits<long long>(x); }
DEVICE double __hiloint2double(int high, int low) {
  return emulator::from_bits<double>(((u64)(u32)high << 32) | (u32)low);
}
DEVICE int __double2hiint(double x) { return (int)(emulator::from_bits<u64>(x) >> 32); }
DEVICE int __double2loint(double x) { return (int)(u32)emulator::from_bits<u64>(x); }

DEVICE u32 __funnelshift_l(u32 low, u32 high, u32 bits) {
  return (u32)(((((u64)high << 32) | low) << (bits & 31)) >> 32);
}
DEVICE u32 __funnelshift_r(u32 low, u32 high, u32 bits) { return (u32)((((u64)high << 32) | low) >> (bits & 31)); }
DEVICE int __popc(u32 x) { return __builtin_popcount(x); }
DEVICE int __popcll(u64 x) { return __builtin_popcountll(x); }
DEVICE int __clz(int x) { return x ? __builtin_clz((u32)x) : 32; }
DEVICE int __clzll(long long x) { return x ? __builtin_clzll((u64)x) : 64; }
DEVICE int __ffs(int x) { return __builtin_ffs(x); }
DEVICE int __ffsll(long long x) { return __builtin_ffsll(x); }
DEVICE u32 __brev(u32 x) {
  u32 y = 0;
  for (int i = 0; i < 32; ++i) y |= ((x >> i) & 1u) << (31 - i);
  return y;
}
DEVICE u64 __brevll(u64 x) { return ((u64)__brev((u32)x) << 32) | __brev((u32)(x >> 32)); }
DEVICE u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const u64 bytes = ((u64)high << 32) | low;
  u32 y = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 s = (selector >> (4 * i)) & 15;
    u32 byte = (u32)(bytes >> (8 * (s & 7))) & 0xffu;
    if (s & 8) byte = byte & 0x80u ? 0xffu : 0;
    y |= byte << (8 * i);
  }
  return y;
}
DEVICE u32 __umulhi(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); }
DEVICE int __mulhi(int a, int b) { return (int)(((long long)a * b) >> 32); }
DEVICE u64 __umul64hi(u64 a, u64 b) { return (u64)(((unsigned __int128)a * b) >> 64); }

template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
static std::common_type_t<A, B> max(A a, B b) {
  if constexpr (std::is_floating_point_v<A> || std::is_floating_point_v<B>) return std::fmax(a, b);
  return (std::common_type_t<A, B>)a > (std::common_type_t<A, B>)b ? a : b;
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
static std::common_type_t<A, B> min(A a, B b) {
  if constexpr (std::is_floating_point_v<A> || std::is_floating_point_v<B>) return std::fmin(a, b);
  return (std::common_type_t<A, B>)a < (std::common_type_t<A, B>)b ? a : b;
}
DEVICE float __fdividef(float a, float b) { return fabsf(b) > 0x1p126f && fabsf(b) < INFINITY ? a * 0.f : a / b; }
// The C library has functions of these names.
#define __expf(x) expf(x)
#define __exp10f(x) powf(10.f, x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf(x, y)
DEVICE float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }
DEVICE float __frcp_rn(float x) { return 1.f / x; }
DEVICE float __fsqrt_rn(float x) { return sqrtf(x); }
DEVICE float __frsqrt_rn(float x) { return (float)(1. / std::sqrt((double)x)); }
DEVICE float __fadd_rn(float a, float b) { return a + b; }
DEVICE float __fsub_rn(float a, float b) { return a - b; }
DEVICE float __fmul_rn(float a, float b) { return a * b; }
DEVICE float __fdiv_rn(float a, float b) { return a / b; }
DEVICE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE double __dadd_rn(double a, double b) { return a + b; }
DEVICE double __dsub_rn(double a, double b) { return a - b; }
DEVICE double __dmul_rn(double a, double b) { return a * b; }
DEVICE double __ddiv_rn(double a, double b) { return a / b; }
DEVICE double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
DEVICE int __float2int_rn(float x) { return (int)rintf(x); }
DEVICE int __float2int_rz(float x) { return (int)x; }
DEVICE float __int2float_rn(int x) { return (float)x; }
DEVICE float __uint2float_rn(u32 x) { return (float)x; }
DEVICE float rsqrtf(float x) { return (float)(1. / std::sqrt((double)x)); }
DEVICE double rsqrt(double x) { return 1. / std::sqrt(x); }
DEVICE float rcbrtf(float x) { return (float)(1. / std::cbrt((double)x)); }
DEVICE double rcbrt(double x) { return 1. / std::cbrt(x); }
DEVICE double sinpi(double x) { return std::sin(M_PI * std::remainder(x, 2.)); }
DEVICE double cospi(double x) { return std::cos(M_PI * std::remainder(x, 2.)); }
DEVICE float sinpif(float x) { return (float)sinpi(x); }
DEVICE float cospif(float x) { return (float)cospi(x); }
DEVICE double erfinv(double y) {
  if (!(std::fabs(y) < 1.)) return std::fabs(y) == 1. ? y * HUGE_VAL : NAN;
  // Winitzki's approximation, then Newton's method in a form that keeps its precision where erf is near 1.
  const double l = std::log1p(-y * y), c = 2. / (M_PI * .147) + l / 2.;
  double x = std::copysign(std::sqrt(std::sqrt(c * c - l / .147) - c), y);
  for (int i = 0; i < 4; ++i) {
    const double far = (1. - std::fabs(y)) - std::erfc(std::fabs(x));
    const double error = std::fabs(y) < .5 ? std::erf(x) - y : y < 0. ? -far : far;
    x -= error * (std::sqrt(M_PI) / 2.) * std::exp(x * x);
  }
  return x;
}
DEVICE float erfinvf(float y) { return (float)erfinv(y); }
DEVICE double erfcx(double x) { return std::exp(x * x) * std::erfc(x); }
DEVICE float erfcxf(float x) { return (float)erfcx(x); }
DEVICE double normcdf(double x) { return .5 * std::erfc(-x * M_SQRT1_2); }
DEVICE float normcdff(float x) { return (float)normcdf(x); }
DEVICE double cyl_bessel_i0(double x) { return std::cyl_bessel_i(0., std::fabs(x)); }
DEVICE double cyl_bessel_i1(double x) { return std::copysign(std::cyl_bessel_i(1., std::fabs(x)), x); }
DEVICE float cyl_bessel_i0f(float x) { return (float)cyl_bessel_i0(x); }
DEVICE float cyl_bessel_i1f(float x) { return (float)cyl_bessel_i1(x); }

// ---- machine.cuh's functions ----

DEVICE u32 bfloat16_of(float x) {  // round to nearest, ties to even; the GPU has one NaN
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
DEVICE u32 float16_of(float x) {
  const u32 bits = __float_as_uint(x), sign = (bits >> 16) & 0x8000u, a = bits & 0x7fffffffu;
  if (x != x) return 0x7fffu;
  if (a >= 0x477ff000u) return sign | 0x7c00u;                                  // 65520 and more
  if (a < 0x38800000u) return sign | (u32)rintf(__uint_as_float(a) * 0x1p24f);  // subnormal
  return sign | (((a + 0xfffu + ((a >> 13) & 1u)) >> 13) - (112u << 10));
}
DEVICE float float_of(u32 float16) {
  const u32 sign = (float16 & 0x8000u) << 16, exponent = (float16 >> 10) & 31u, mantissa = float16 & 0x3ffu;
  if (exponent == 0) return __uint_as_float(sign | __float_as_uint((float)mantissa * 0x1p-24f));
  return __uint_as_float(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | mantissa << 13);
}
DEVICE u32 pack_bfloat16(float low, float high) { return bfloat16_of(low) | bfloat16_of(high) << 16; }
DEVICE u32 pack_float16(float low, float high) { return float16_of(low) | float16_of(high) << 16; }
DEVICE float low_float16(u32 word) { return float_of(word & 0xffffu); }
DEVICE float high_float16(u32 word) { return float_of(word >> 16); }

// One byte of a float8 with this many bits of mantissa and bias: the largest finite number for what is larger.
DEVICE u32 float8_of(float x, int mantissa, int bias, u32 last) {
  const u32 sign = signbit(x) ? 0x80u : 0u;
  if (x != x) return sign | 0x7fu;
  const float a = fabsf(x), smallest = ldexpf(1.f, 1 - bias);
  int exponent = 0;
  if (a >= smallest) frexpf(a, &exponent);
  const int unit = (a >= smallest ? exponent - 1 : 1 - bias) - mantissa;
  const float steps = rintf(ldexpf(a, -unit));
  if (a >= 1e6f) return sign | last;
  const u32 code =
      a >= smallest ? ((u32)(exponent - 1 + bias) << mantissa) + (u32)steps - (1u << mantissa) : (u32)steps;
  return sign | (code < last ? code : last);
}
DEVICE u32 saturate_float8_e4m3fn(float low, float high) {
  return float8_of(low, 3, 7, 0x7eu) | float8_of(high, 3, 7, 0x7eu) << 8;
}
DEVICE u32 saturate_float8_e5m2(float low, float high) {
  return float8_of(low, 2, 15, 0x7bu) | float8_of(high, 2, 15, 0x7bu) << 8;
}

DEVICE float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.f, x) : x; }
DEVICE float exp2_fast(float x) { return flush(exp2f(flush(x))); }
DEVICE float reciprocal_fast(float x) { return flush(1.f / flush(x)); }
DEVICE float max_nan(float a, float b) {
  if (a != a || b != b) return __uint_as_float(0x7fffffffu);
  return a > b || (a == b && !signbit(a)) ? a : b;
}
DEVICE float min_nan(float a, float b) {
  if (a != a || b != b) return __uint_as_float(0x7fffffffu);
  return a < b || (a == b && signbit(a)) ? a : b;
}
DEVICE u32 max_nan_bfloat16(u32 a, u32 b) {
  return pack_bfloat16(max_nan(__uint_as_float(a << 16), __uint_as_float(b << 16)),
                       max_nan(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u)));
}
DEVICE u32 max_nan_float16(u32 a, u32 b) {
  return pack_float16(max_nan(low_float16(a), low_float16(b)), max_nan(high_float16(a), high_float16(b)));
}
DEVICE u32 add_by_fma_pipe(u32 a, u32 b) { return a * blockDim.z + b; }
DEVICE void let_next_begin() {}
DEVICE void wait_for_launch_before() {}
DEVICE void forget(u32& word) { asm volatile("" : "+r"(word)); }
DEVICE void forget_memory() { asm volatile("" ::: "memory"); }

DEVICE char* dynamic_shared() { return emulator::current->block->shared; }
#if __CUDA_ARCH__ >= 900
// A copy lands as late as it can, at once, or some time in between, depending on the order. What its place held is gone
// from the moment it starts.
void barrier_init(u64* barrier, u32 arrivals);
void barriers_ready();
void barrier_expect(u64* barrier, u32 bytes);
void barrier_wait(u64* barrier, u32 parity, int line = __builtin_LINE());
void barrier_arrive(u64* barrier);
bool arrives_last(u64* barrier);
void bulk_load(char* to, const char* from, u32 bytes, u64* barrier);
void cluster_sync(int line = __builtin_LINE());
void cluster_send(u32* place, int rank, u32 value, u64* barrier);
#endif
constexpr u64 kPostTag = 0x9d3b5c71e86f0000ull;
void post_write(char* post, u64 value, u64 tag = kPostTag);
u64 post_load(const char* post, bool wanted, u64& value, u64 tag);
bool post_read(const char* post, bool wanted, u64& value, int line = __builtin_LINE());
int post_count(char* post);
void post_clear(char* post);

// ---- the emulator's inside, compiled once ----

#ifdef EMULATOR_INSIDE
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <ctime>
#include <map>
#include <string>
#include <vector>
#if !defined(__x86_64__) || defined(EMULATOR_UCONTEXT)
#define EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

// Of GNU's linker: where the static shared arrays lie.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_static_shared[], __stop_static_shared[];

namespace emulator {

constexpr u64 kStack = 64 << 10;  // bytes of a fiber
constexpr u64 kGuard = 1024;      // bytes before and behind the shared memory of a block
constexpr unsigned char kPattern = 0xA5;
constexpr u64 kMagic = 0x6a65726c6165726bull;  // what an emulated barrier's 64 bits hold

Thread* current;
uint3 block_size, grid_size;
const Launch* launch;
u32 last_buffer;

struct Barrier {
  bool ready;          // barriers_ready came after barrier_init
  u32 phase, arrived;  // the phase under way; arrivals in it
  u32 arrivals;        // that end it
  long long expected;  // bytes that are still to land
  std::vector<Thread*> waiting;
  std::vector<u32> parities;
};
struct Copy {
  char* to;
  const char* from;  // null: `value`
  u32 bytes, value;
  Barrier* barrier;
  Block* block;
};

static std::vector<Thread> threads;  // of the cluster, block after block
static std::vector<Block> blocks;
static std::vector<Thread*> runnable;  // the last one is next
static std::vector<Copy> copies;       // under way
static std::map<u64*, Barrier> barriers;
static std::vector<Thread*> post_readers;  // wait for the next post
static std::vector<char> shared_memory, saved_static_shared;
static u32 threads_of_block, cluster_waiting, cluster_syncs, order, cluster_ended;
static int cluster_line;
static std::vector<int> block_lines;
static u64 random_state;
static std::string error;
static void (*body)(const void*);
static const void* kernel;
static char* stacks;
static u64 stack_count;

static u32 random_below(u32 n) {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return (u32)((random_state >> 32) % n);
}

// ---- fibers ----

#ifndef EMULATOR_UCONTEXT
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
static void* new_fiber(char* stack, u64 bytes, void (*start)()) {
  void** top = (void**)(stack + bytes);  // a multiple of 16
  *--top = nullptr;                      // where `start` would return to
  *--top = (void*)start;
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  return top;
}
static void* scheduler;  // the stack pointer of run_cluster
#else
static ucontext_t contexts[64 * 1024 + 1];  // the last one is the scheduler's
static void emulator_switch(void** save, void* load) { swapcontext((ucontext_t*)*save, (ucontext_t*)load); }
static void* new_fiber(char* stack, u64 bytes, void (*start)()) {
  ucontext_t* context = &contexts[(u64)(stack - stacks) / kStack];
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = bytes;
  context->uc_link = nullptr;
  makecontext(context, start, 0);
  return context;
}
static void* scheduler = &contexts[64 * 1024];
#endif

static void exchange_static_shared(Block* from, Block* to) {
  const u64 bytes = (u64)(__stop_static_shared - __start_static_shared);
  if (!bytes || blocks.size() == 1 || from == to) return;
  memcpy(saved_static_shared.data() + from->rank * bytes, __start_static_shared, bytes);
  memcpy(__start_static_shared, saved_static_shared.data() + to->rank * bytes, bytes);
}
static void go_to(Thread* next) {
  if (next == current) return;
  Thread* last = current;
  exchange_static_shared(last->block, next->block);
  current = next;
  emulator_switch(&last->stack_pointer, next->stack_pointer);
}
static void leave_to_scheduler() {
  Thread* last = current;
  current = nullptr;
  emulator_switch(&last->stack_pointer, scheduler);
}
static void note(const char* format, va_list arguments) {
  if (!error.empty()) return;
  char text[700];
  vsnprintf(text, sizeof text, format, arguments);
  error = text;
  if (current) {
    const uint3 t = current->index, b = current->block->index;
    snprintf(text, sizeof text, " (thread %u,%u,%u of block %u,%u,%u, after line %d)", t.x, t.y, t.z, b.x, b.y, b.z,
             current->line);
    error += text;
  }
}
void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  note(format, arguments);
  va_end(arguments);
  leave_to_scheduler();
  __builtin_unreachable();
}

static void release(Thread* const* first, u64 count) {
  for (u64 i = 0; i < count; ++i) {
    Thread* thread = first[order == 2 ? i : count - 1 - i];
    thread->waits = nullptr;
    runnable.push_back(thread);
  }
}
static void release(Thread* first, u64 count) {
  for (u64 i = 0; i < count; ++i) {
    Thread* thread = first + (order == 2 ? i : count - 1 - i);
    thread->waits = nullptr;
    runnable.push_back(thread);
  }
}
static void complete(Barrier& barrier) {
  if (barrier.arrived < barrier.arrivals || barrier.expected) return;
  barrier.phase ^= 1, barrier.arrived = 0;
  std::vector<Thread*> free, stay;
  std::vector<u32> parities;
  for (u64 i = 0; i < barrier.waiting.size(); ++i) {
    if (barrier.parities[i] != barrier.phase) {
      free.push_back(barrier.waiting[i]);
    } else {
      stay.push_back(barrier.waiting[i]), parities.push_back(barrier.parities[i]);
    }
  }
  barrier.waiting = stay, barrier.parities = parities;
  release(free.data(), free.size());
}
static void land(u64 number) {
  const Copy copy = copies[number];
  copies.erase(copies.begin() + (long)number);
  memcpy(copy.to, copy.from ? copy.from : (const char*)&copy.value, copy.bytes);
  copy.barrier->expected -= copy.bytes;
  complete(*copy.barrier);
}
static void next_thread() {
  while (runnable.empty() && !copies.empty()) land(order == 3 ? random_below((u32)copies.size()) : 0);
  // Threads that look again and again for what another block writes are always runnable.
  if (order == 3 && !copies.empty() && !random_below(64)) land(random_below((u32)copies.size()));
  if (runnable.empty()) return leave_to_scheduler();
  if (order == 3) std::swap(runnable.back(), runnable[random_below((u32)runnable.size())]);
  Thread* next = runnable.back();
  runnable.pop_back();
  go_to(next);
}
static void wait(const char* what, int line) {
  current->waits = what, current->line = line;
  next_thread();
}
static void start() {
  body(kernel);
  current->ended = true;
  ++cluster_ended;
  if (++current->block->ended == threads_of_block) {
    for (const Copy& copy : copies) {
      if (copy.block == current->block) fail("a block ends while its bulk copies are under way");
    }
  }
  next_thread();
}

// ---- threads that wait for each other ----

void block_sync(int line) {
  Block* block = current->block;
  int& first_line = block_lines[block->rank];
  if (block->waiting && first_line != line) {
    fail("threads of a block wait at different barriers: __syncthreads in line %d and in line %d", first_line, line);
  }
  first_line = line;
  current->waits = "__syncthreads";
  if (++block->waiting == threads_of_block) {
    block->waiting = 0;
    release(&threads[block->rank * threads_of_block], threads_of_block);
    current->line = line;
    return next_thread();
  }
  wait("__syncthreads", line);
}

u64 warp_exchange(Exchange exchange, const char* what, int line, u32 mask, u64 value, int source) {
  Thread* self = current;
  const u32 first = self->number / 32 * 32;
  Thread* lanes = self - (self->number - first);
  const u32 count = threads_of_block - first < 32 ? threads_of_block - first : 32;
  if (!(mask >> (self->number - first) & 1)) fail("%s in line %d: the lane is not in its mask", what, line);
  if (count < 32 && mask >> count) fail("%s in line %d: the mask has lanes that the block lacks", what, line);
  self->waits = what, self->line = line;
  self->mask = mask, self->value = value, self->source = source;
  bool all = true;
  for (u32 i = 0; i < count && all; ++i) {
    const u32 n = order == 1 ? count - 1 - i : i;  // the one that comes last first
    if (mask >> n & 1) all = lanes[n].waits && lanes[n].mask;
  }
  if (!all) {
    next_thread();
    return self->result;
  }
  u64 ballot = 0;
  Thread* group[32];
  u32 size = 0;
  for (u32 i = 0; i < count; ++i) {
    if (!(mask >> i & 1)) continue;
    Thread& lane = lanes[i];
    group[size++] = &lane;
    if (lane.mask != mask || lane.waits != what || lane.line != line) {
      fail("lanes of a warp do different things: %s in line %d of lanes %08x, %s in line %d of lanes %08x", lane.waits,
           lane.line, lane.mask, what, line, mask);
    }
    if (exchange == Exchange::kBallot && lane.value) ballot |= 1ull << i;
    if (exchange == Exchange::kShuffle && ((u32)lane.source >= count || !(mask >> lane.source & 1))) {
      fail("%s in line %d: lane %u reads lane %d, which does not take part", what, line, i, lane.source);
    }
  }
  for (u32 i = 0; i < size; ++i) {
    group[i]->result = exchange == Exchange::kShuffle ? lanes[group[i]->source].value : ballot;
  }
  for (u32 i = 0; i < size; ++i) group[i]->mask = 0;
  release(group, size);
  next_thread();
  return self->result;
}

// ---- addresses ----

static bool holds(const Buffer& buffer, const void* from, u64 bytes) {
  return (const char*)from >= buffer.begin && (const char*)from + bytes <= buffer.begin + buffer.bytes;
}
void check_read(const void* from, u64 bytes, u64 alignment, const char* what) {
  if ((u64)from % alignment) fail("%s of %llu bytes from a misaligned address", what, bytes);
  if (last_buffer < launch->buffer_count && holds(launch->buffers[last_buffer], from, bytes)) return;
  for (u32 i = 0; i < launch->buffer_count; ++i) {
    if (holds(launch->buffers[i], from, bytes)) {
      last_buffer = i;
      return;
    }
  }
  for (u32 i = 0; i < launch->buffer_count; ++i) {
    const Buffer& buffer = launch->buffers[i];
    const long long offset = (const char*)from - buffer.begin;
    if (offset > -4096 && offset < (long long)buffer.bytes + 4096) {
      fail("%s of %llu bytes outside of buffer %u: offset %lld of %llu bytes", what, bytes, i, offset, buffer.bytes);
    }
  }
  fail("%s of %llu bytes from an address outside of all buffers", what, bytes);
}

// What GCC calls where its sanitizers find something.
struct SourceLocation {
  const char* file;
  u32 line, column;
};
struct Found {
  SourceLocation at;
};
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(Found* found, u64 address) {
  fail("misaligned address ...%02llx in line %u, column %u", address & 255, found->at.line, found->at.column);
}
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_out_of_bounds(Found* found, u64 index) {
  fail("index %lld outside of an array in line %u, column %u", (long long)index, found->at.line, found->at.column);
}
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_shift_out_of_bounds(Found* found, u64, u64 bits) {
  fail("shift by %lld bits in line %u, column %u", (long long)bits, found->at.line, found->at.column);
}

static struct sigaction old_actions[4];
static const int signals[4] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static void on_signal(int number, siginfo_t* info, void*) {
  if (!current) {
    signal(number, SIG_DFL);
    raise(number);
    return;
  }
  if (number == SIGSEGV || number == SIGBUS) fail("access to an invalid address %p", info->si_addr);
  if (number == SIGFPE) fail("integer division by zero, or of the smallest integer by -1");
  if (number == SIGILL) fail("the kernel reached what must not be reached");
  fail("the kernel ran longer than %g s", launch->seconds);
}

// ---- clusters ----

static std::string describe_deadlock() {
  std::string text = "threads wait for each other for ever:";
  u64 first = 0, lines = 0;
  auto same = [](const Thread& a, const Thread& b) {
    return a.block == b.block && a.ended == b.ended && (a.ended || (a.waits == b.waits && a.line == b.line));
  };
  for (u64 i = 1; i <= threads.size(); ++i) {
    if (i < threads.size() && same(threads[first], threads[i])) continue;
    const Thread& thread = threads[first];
    char line[200];
    const int length = snprintf(line, sizeof line, " block %u, threads %u to %u ", thread.block->index.x, thread.number,
                                threads[i - 1].number);
    if (thread.ended) {
      snprintf(line + length, sizeof line - (u64)length, "have ended;");
    } else {
      snprintf(line + length, sizeof line - (u64)length, "wait at %s in line %d;", thread.waits ? thread.waits : "?",
               thread.line);
    }
    if (++lines <= 12) text += line;
    first = i;
  }
  if (lines > 12) text += " ...";
  return text;
}
__attribute__((format(printf, 1, 2))) static void found(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  note(format, arguments);
  va_end(arguments);
}

static void run_cluster(uint3 first_block, u64 number) {
  const u32 cluster = launch->cluster;
  order = launch->order ? launch->order : 1 + number % 3;
  random_state = 0x9e3779b97f4a7c15ull * (number + 1);
  runnable.clear(), copies.clear(), barriers.clear(), post_readers.clear();
  cluster_waiting = cluster_syncs = cluster_ended = 0;
  const u64 stride = (kGuard + launch->shared_bytes + 127) / 128 * 128 + kGuard;
  shared_memory.resize(cluster * stride + 256);
  char* memory = (char*)(((u64)shared_memory.data() + 127) / 128 * 128);
  memset(memory, kPattern, cluster * stride);
  blocks.assign(cluster, Block());
  block_lines.assign(cluster, 0);
  threads.assign(cluster * threads_of_block, Thread());
  const u64 static_bytes = (u64)(__stop_static_shared - __start_static_shared);
  saved_static_shared.assign(static_bytes * cluster, (char)0xff);
  if (static_bytes) memset(__start_static_shared, 0xff, static_bytes);
  for (u32 rank = 0; rank < cluster; ++rank) {
    Block& block = blocks[rank];
    block.index = {first_block.x + rank, first_block.y, first_block.z};
    block.rank = rank;
    block.shared = memory + rank * stride + kGuard;
    memset(block.shared, 0xff, launch->shared_bytes);
    for (u32 i = 0; i < threads_of_block; ++i) {
      const u64 n = rank * threads_of_block + i;
      Thread& thread = threads[n];
      thread.index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
      thread.block = &block, thread.number = i;
      // Stacks begin in different cache lines.
      char* stack = stacks + n * kStack;
      memcpy(stack, &kMagic, 8);
      thread.stack_pointer = new_fiber(stack, kStack - n % 61 * 64, start);
    }
  }
  release(threads.data(), threads.size());
  Thread* next = runnable.back();
  runnable.pop_back();
  current = next;
  emulator_switch(&scheduler, next->stack_pointer);
  if (!error.empty()) return;
  if (cluster_ended < threads.size()) {
    error = describe_deadlock();
    return;
  }
  for (const Block& block : blocks) {
    const unsigned char* before = (const unsigned char*)block.shared - kGuard;
    const unsigned char* behind = (const unsigned char*)block.shared + launch->shared_bytes;
    for (u64 i = 0; i < kGuard; ++i) {
      if (before[i] != kPattern) return found("block %u wrote in front of its shared memory", block.index.x);
      if (behind[i] != kPattern) return found("block %u wrote behind its shared memory, byte %llu", block.index.x, i);
    }
  }
  for (u64 n = 0; n < threads.size(); ++n) {
    if (memcmp(stacks + n * kStack, &kMagic, 8)) return found("a thread needs more than %llu bytes of stack", kStack);
  }
}

const char* run(const Launch& the_launch, void (*the_body)(const void*), const void* the_kernel) {
  launch = &the_launch, body = the_body, kernel = the_kernel;
  error.clear();
  current = nullptr;
  last_buffer = 0;
  block_size = {launch->block[0], launch->block[1], launch->block[2]};
  grid_size = {launch->grid[0], launch->grid[1], launch->grid[2]};
  threads_of_block = block_size.x * block_size.y * block_size.z;
  if (!threads_of_block || threads_of_block > 1024) return "a block has 1 to 1024 threads";
  if (!launch->cluster || launch->cluster > 64) return "a cluster has 1 to 16 blocks, 64 may run at once";
  if (grid_size.x % launch->cluster) return "the grid is not a multiple of the cluster";
  const u64 count = (u64)launch->cluster * threads_of_block;
  if (count > stack_count) {
    if (stacks) munmap(stacks, stack_count * kStack);
    stacks = (char*)mmap(nullptr, count * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                         -1, 0);
    stack_count = count;
    if (stacks == MAP_FAILED) return stacks = nullptr, stack_count = 0, "no memory for the stacks";
  }

  // Faults and the time limit end a launch; the handlers run on a stack of their own, and leave it for the scheduler.
  std::vector<char> handler_stack(64 << 10);
  stack_t own_stack = {}, old_stack;
  own_stack.ss_sp = handler_stack.data(), own_stack.ss_size = handler_stack.size();
  sigaltstack(&own_stack, &old_stack);
  struct sigaction action = {}, old_timer_action;
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 4; ++i) sigaction(signals[i], &action, &old_actions[i]);
  const int timer_signal = SIGRTMIN + 3;
  sigaction(timer_signal, &action, &old_timer_action);
  sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = timer_signal;
  event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
  timer_t timer;
  timer_create(CLOCK_MONOTONIC, &event, &timer);
  itimerspec limit = {};
  limit.it_value.tv_sec = (time_t)launch->seconds;
  limit.it_value.tv_nsec = (long)((launch->seconds - (double)limit.it_value.tv_sec) * 1e9);
  timer_settime(timer, 0, &limit, nullptr);

  u64 number = 0;
  for (u32 z = 0; z < grid_size.z && error.empty(); ++z) {
    for (u32 y = 0; y < grid_size.y && error.empty(); ++y) {
      for (u32 x = 0; x < grid_size.x && error.empty(); x += launch->cluster) run_cluster({x, y, z}, number++);
    }
  }
  current = nullptr;

  timer_delete(timer);
  sigaction(timer_signal, &old_timer_action, nullptr);
  for (int i = 0; i < 4; ++i) sigaction(signals[i], &old_actions[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  return error.empty() ? nullptr : error.c_str();
}

static bool in_shared(const void* place, u64 bytes) {
  const char* begin = current->block->shared;
  return (const char*)place >= begin && (const char*)place + bytes <= begin + launch->shared_bytes;
}
static Barrier& find(u64* barrier) {
  if (!in_shared(barrier, 8)) fail("a barrier outside of the block's shared memory");
  const auto it = barriers.find(barrier);
  if (it == barriers.end()) fail("a barrier is used that barrier_init did not make");
  if (*barrier != kMagic) fail("something wrote over a barrier");
  if (!it->second.ready) fail("a barrier is used before barriers_ready");
  return it->second;
}

}  // namespace emulator

using namespace emulator;

void barrier_init(u64* barrier, u32 arrivals) {
  if ((u64)barrier % 8) fail("a barrier at a misaligned address");
  if (!in_shared(barrier, 8)) fail("a barrier outside of shared memory");
  *barrier = kMagic;
  barriers[barrier] = Barrier();
  barriers[barrier].arrivals = arrivals;
}
void barriers_ready() {
  for (auto& [place, barrier] : barriers) {
    if (in_shared(place, 8)) barrier.ready = true;
  }
}
void barrier_expect(u64* place, u32 bytes) {
  Barrier& barrier = find(place);
  if (barrier.arrived) fail("barrier_expect twice in one phase of a barrier");
  if (barrier.arrivals != 1) fail("barrier_expect of a barrier at which several threads arrive");
  if (bytes >= 1 << 20) fail("a barrier counts less than 2^20 bytes");
  barrier.arrived = 1, barrier.expected += bytes;
  complete(barrier);
}
void barrier_arrive(u64* place) {
  Barrier& barrier = find(place);
  if (barrier.arrived == barrier.arrivals) fail("more threads arrive at a barrier than it counts");
  ++barrier.arrived;
  complete(barrier);
}
bool arrives_last(u64* place) {
  Barrier& barrier = find(place);
  const bool last = ++barrier.arrived == barrier.arrivals;
  complete(barrier);
  return last;
}
void barrier_wait(u64* place, u32 parity, int line) {
  Barrier& barrier = find(place);
  if (barrier.phase != (parity & 1)) return;
  barrier.waiting.push_back(current), barrier.parities.push_back(parity & 1);
  emulator::wait("barrier_wait", line);
}
void bulk_load(char* to, const char* from, u32 bytes, u64* place) {
  Barrier& barrier = find(place);
  if ((u64)to % 16 || (u64)from % 16 || bytes % 16 || !bytes) {
    fail("bulk_load of %u bytes, source ...%02llx, target ...%02llx: not multiples of 16", bytes, (u64)from % 256,
         (u64)to % 256);
  }
  if (!in_shared(to, bytes)) fail("bulk_load to outside of shared memory");
  check_read(from, bytes, 16, "bulk_load");
  for (const Copy& copy : copies) {
    if (to < copy.to + copy.bytes && copy.to < to + bytes) fail("two bulk copies to one place are under way");
  }
  memset(to, 0xff, bytes);
  copies.push_back({to, from, bytes, 0, &barrier, current->block});
  if (order == 2 || (order == 3 && random_below(2))) land(copies.size() - 1);
}
void cluster_sync(int line) {
  if (cluster_waiting && cluster_line != line) {
    fail("threads of a cluster wait at different barriers: cluster_sync in line %d and in line %d", cluster_line, line);
  }
  cluster_line = line;
  current->waits = "cluster_sync", current->line = line;
  if (++cluster_waiting == threads.size()) {
    cluster_waiting = 0, ++cluster_syncs;
    release(threads.data(), threads.size());
  }
  next_thread();
}
void cluster_send(u32* place, int rank, u32 value, u64* barrier) {
  if ((u64)place % 4) fail("cluster_send to a misaligned address");
  if (!in_shared(place, 4)) fail("cluster_send to outside of shared memory");
  if (rank < 0 || rank >= (int)blocks.size()) fail("cluster_send to rank %d of %d", rank, (int)blocks.size());
  if (!cluster_syncs) fail("cluster_send before the first cluster_sync: the other block may not have started");
  Block& block = blocks[(u64)rank];
  if (block.ended == threads_of_block) fail("cluster_send to a block that has ended");
  char* const to = block.shared + ((char*)place - current->block->shared);
  find(barrier);
  Barrier& other = barriers.at((u64*)(block.shared + ((char*)barrier - current->block->shared)));
  for (const Copy& copy : copies) {
    if (to < copy.to + copy.bytes && copy.to < to + 4) fail("two values are sent to one place");
  }
  memset(to, 0xff, 4);
  copies.push_back({to, nullptr, 4, value, &other, &block});
  if (order == 2 || (order == 3 && random_below(2))) land(copies.size() - 1);
}

static u64* find_post(const char* post) {
  if ((u64)post % 16) fail("a post at a misaligned address");
  check_read(post, 16, 16, "a post");
  return (u64*)post;
}
void post_write(char* post, u64 value, u64 tag) {
  u64* const words = find_post(post);
  if (words[0] >> 16 == tag >> 16) fail("two values are written to one post");
  words[0] = tag, words[1] = value;
  const std::vector<Thread*> readers = std::move(post_readers);
  post_readers.clear();
  release(readers.data(), readers.size());
}
u64 post_load(const char* post, bool wanted, u64& value, u64 tag) {
  if (!wanted) return tag;
  const u64* const words = find_post(post);
  value = words[1];
  return words[0];
}
// Waits for another post where this one is not there: a loop that asks again and again would keep all others waiting.
bool post_read(const char* post, bool wanted, u64& value, int line) {
  if (!wanted) return true;
  const u64* const words = find_post(post);
  if (words[0] >> 16 != kPostTag >> 16) {
    post_readers.push_back(current);
    emulator::wait("post_read", line);
    if (words[0] >> 16 != kPostTag >> 16) return false;
  }
  value = words[1];
  return true;
}
int post_count(char* post) {
  u64* const words = find_post(post);
  if (words[0] >> 16 != kPostTag >> 16) fail("a post is counted that is not there");
  return (int)(words[0]++ & 0xffff);
}
void post_clear(char* post) {
  u64* const words = find_post(post);
  if (words[0] >> 16 != kPostTag >> 16) fail("a post is cleared that is not there");
  words[0] = 0;
}
#endif
#endif
