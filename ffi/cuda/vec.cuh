// What every CUDA kernel here uses: 16-byte vectors, the types arithmetic is done in, fast division, and the host-side
// glue from FFI dtypes and CUDA errors. Nothing in this file knows an operation.
#ifndef JAXNORM_CUDA_VEC_CUH_
#define JAXNORM_CUDA_VEC_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <bit>
#include <cstdint>
#include <string>
#include <type_traits>

#include "call.h"

namespace jaxnorm {

// ---- Arithmetic types ----

template <typename T>
struct AccTOf {
  using type = float;
};
template <>
struct AccTOf<double> {
  using type = double;
};
// What values of T are summed, scaled and exponentiated in: float32, or float64 for float64.
template <typename T>
using AccT = typename AccTOf<T>::type;

__device__ __forceinline__ float ToAcc(__half x) { return __half2float(x); }
__device__ __forceinline__ float ToAcc(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float ToAcc(float x) { return x; }
__device__ __forceinline__ double ToAcc(double x) { return x; }

// 1 / x in one instruction, off by less than 2^-23.
__device__ __forceinline__ float ApproximateReciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Rounds to nearest, ties to even.
template <typename T>
__device__ __forceinline__ T FromAcc(AccT<T> x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

// ---- 16-byte vectors ----

inline constexpr int kVecBytes = 16;  // widest load or store of one thread before sm_100
// What a cache line and a row of shared memory's banks hold. Shared memory that starts elsewhere makes two rows of every
// copied line, which was measured to cost up to 13%.
inline constexpr int kLineBytes = 128;
template <typename T>
inline constexpr int kVecSize = kVecBytes / sizeof(T);

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

// Two 16-bit elements, for which there are instructions; and such a vector as pairs.
template <typename T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
template <typename T, int N>
struct alignas(sizeof(T) * N) Pairs {
  Pair<T> p[N / 2];
};

// The same bits as 32-bit words, which is what shuffles and shifts take.
template <int kCount>
struct Words {
  uint32_t w[kCount];
};
template <typename P>
using WordsOf = Words<sizeof(P) / sizeof(uint32_t)>;

// All elements, in the arithmetic's dtype. By words, bfloat16 takes one instruction for each.
template <typename T, int N>
__device__ __forceinline__ void ToAccAll(const Vec<T, N>& from, AccT<T> (&to)[N]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const auto words = std::bit_cast<Words<N / 2>>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      to[i] = __uint_as_float(i % 2 == 0 ? words.w[i / 2] << 16 : words.w[i / 2] & 0xffff0000);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = ToAcc(from.v[i]);
  }
}

// Rounds N values at once: the 16-bit types have an instruction that converts and packs two.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> RoundVec(const AccT<T> (&values)[N]) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    Pairs<T, N> pairs;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if constexpr (std::is_same_v<T, __half>) {
        pairs.p[i] = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
      } else {
        pairs.p[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      }
    }
    return reinterpret_cast<const Vec<T, N>&>(pairs);
  } else {
    Vec<T, N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) out.v[i] = FromAcc<T>(values[i]);
    return out;
  }
}

// NaN stays NaN.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> Relu(Vec<T, N> v) {
  if constexpr (sizeof(T) == 2) {
    auto& pairs = reinterpret_cast<Pairs<T, N>&>(v);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs.p[i] = __hmax2_nan(pairs.p[i], Pair<T>(T{}, T{}));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) v.v[i] = v.v[i] <= 0 ? T{} : v.v[i];  // false for NaN
  }
  return v;
}

// Relu(RoundVec<T>(values)): the conversion to a 16-bit type does both.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> RoundRelu(const AccT<T> (&values)[N]) {
  if constexpr (sizeof(T) == 2) {
    Words<N / 2> words;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if constexpr (std::is_same_v<T, __half>) {
        asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(words.w[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
      } else {
        asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(words.w[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
      }
    }
    return std::bit_cast<Vec<T, N>>(words);
  } else {
    return Relu(RoundVec<T>(values));
  }
}

// 16 bytes full of `value`.
template <typename T>
__device__ __forceinline__ uint4 SplatWords(T value) {
  Vec<T, kVecSize<T>> vec;
#pragma unroll
  for (int i = 0; i < kVecSize<T>; ++i) vec.v[i] = value;
  return std::bit_cast<uint4>(vec);
}

// Reads 16 bytes; p is 16-byte aligned and in global memory, which the kernel does not write (read-only path).
template <typename T>
__device__ __forceinline__ Vec<T, kVecSize<T>> Load(const T* p) {
  return std::bit_cast<Vec<T, kVecSize<T>>>(__ldg(reinterpret_cast<const uint4*>(p)));
}

// How long the L2 cache keeps what is read with it.
//
// Where all that a call reads is on its way at once, evict-first takes 3 to 10% off its time: what it reads then displaces
// what calls before have read, and not their results, which would have to be written to memory meanwhile. Beyond what fits
// on chip it costs time, 5% of a plain copy.
enum class L2Policy : uint64_t {};

__device__ __forceinline__ L2Policy EvictFirst() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return L2Policy{policy};
}
__device__ __forceinline__ L2Policy EvictLast() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return L2Policy{policy};
}

// As Load.
template <typename T>
__device__ __forceinline__ uint4 LoadWords(const T* p, L2Policy policy) {
  uint4 words;
  asm("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(__cvta_generic_to_global(p)), "l"(static_cast<uint64_t>(policy)));
  return words;
}

// Writes 16, 4 or 2 bytes; p is aligned to as many and in global memory. Default cache policy: a result is often read
// next, and marking it evict-first was measured 0.5 to 1% slower on an H200.
template <typename T, int N>
__device__ __forceinline__ void Store(T* p, const Vec<T, N>& value) {
  // Not `*p = words`, which nvcc 13.0 merged with scalar stores of another branch and so split into narrower ones. Not
  // __stwb either, which compiles to a store with memory ordering (STG.STRONG.SM).
  if constexpr (sizeof(value) == 2) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "h"(std::bit_cast<uint16_t>(value))
                 : "memory");
  } else if constexpr (sizeof(value) == 4) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(std::bit_cast<uint32_t>(value))
                 : "memory");
  } else {
    const auto words = std::bit_cast<uint4>(value);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
  }
}

// Both halves full of their sign bits.
__device__ __forceinline__ uint32_t SignsOfHalves(uint32_t word) {
  uint32_t signs;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(word));
  return signs;
}

// The same value, in a register from here on: else the compiler may compute it again for every use.
template <typename N>
__device__ __forceinline__ N Kept(N value) {
  if constexpr (std::is_same_v<N, float>) {
    asm volatile("" : "+f"(value));
  } else if constexpr (sizeof(N) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
  return value;
}

// Shared memory by its address: from a pointer, the compiler computes it again for every access, in several
// instructions.
__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return Kept(static_cast<uint32_t>(__cvta_generic_to_shared(p)));
}

// P is made of 32-bit words and aligned to 8 bytes, or to 16 if it has 16 or more.
template <typename P>
__device__ __forceinline__ P LoadShared(uint32_t address) {
  WordsOf<P> words;
  constexpr int kCount = sizeof(P) / sizeof(uint32_t);
  if constexpr (kCount == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.w[0]), "=r"(words.w[1]), "=r"(words.w[2]), "=r"(words.w[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.w[0]), "=r"(words.w[1]) : "r"(address) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words.w[i]) : "r"(address + 4 * i) : "memory");
    }
  }
  return std::bit_cast<P>(words);
}

template <typename P>
__device__ __forceinline__ void StoreShared(uint32_t address, P value) {
  const auto words = std::bit_cast<WordsOf<P>>(value);
  constexpr int kCount = sizeof(P) / sizeof(uint32_t);
  if constexpr (kCount == 4) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words.w[0]), "r"(words.w[1]),
                 "r"(words.w[2]), "r"(words.w[3])
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(words.w[0]), "r"(words.w[1]) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(address + 4 * i), "r"(words.w[i]) : "memory");
    }
  }
}

// 16 bytes. Eight lanes ask L2 for 128 neighbouring bytes together; where those do not begin with a sector of 32 bytes, as in
// rows of odd length, they have a sector in common with the eight lanes on either side, which L2 sends twice. kCached: by way
// of L1, which asks for it once.
template <bool kCached = false>
__device__ __forceinline__ void CopyAsync(uint32_t shared, const void* global) {
  if constexpr (kCached) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
  }
}

// Likewise, not by way of L1.
__device__ __forceinline__ void CopyAsync(uint32_t shared, const void* global, L2Policy policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "l"(static_cast<uint64_t>(policy))
               : "memory");
}

// 4 bytes.
__device__ __forceinline__ void CopyWordAsync(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// Copies a vector from global to shared memory, 4, 8 or 16 bytes asynchronously: complete after CopyWait. Smaller ones at
// once.
template <bool kCached = false, typename V>
__device__ __forceinline__ void CopyAsync(V* shared, const V* global) {
  if constexpr (sizeof(V) == kVecBytes) {
    CopyAsync<kCached>(static_cast<uint32_t>(__cvta_generic_to_shared(shared)), static_cast<const void*>(global));
  } else if constexpr (sizeof(V) == 8 || sizeof(V) == 4) {
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
        "l"(__cvta_generic_to_global(global)), "n"(sizeof(V))
        : "memory");
  } else {
    *shared = *global;
  }
}

// Ends a group of copies. CopyWait<n> waits until at most the n latest groups are still under way.
__device__ __forceinline__ void CopyCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void CopyWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__host__ __device__ inline bool IsVecAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kVecBytes == 0; }

// ---- Division by a number known at launch ----

// n / d for 0 <= n <= INT32_MAX and 1 <= d <= INT32_MAX: one multiply-high and one shift in place of ~20 instructions.
//
// Granlund & Montgomery, "Division by Invariant Integers using Multiplication" (PLDI 1994), theorem 4.2 with N = 31:
// floor(n / d) = floor(m * n / 2^(31 + s)) for all n < 2^31 if 2^(31 + s) <= m * d <= 2^(31 + s) + 2^s.
// With s = ceil(log2 d), m = ceil(2^(31 + s) / d) satisfies it, as m * d exceeds 2^(31 + s) by less than d <= 2^s.
// m fits 32 bits: d >= 2^(s - 1) + 1 and s <= 31 give 2^(31 + s) / d < 2^32 - 3 (for d = 1, m is 2^31).
// Multiplying 2n, which fits 32 bits too, turns the shift by 31 + s into "upper word, then shift by s".
class FastDiv {
 public:
  FastDiv() = default;
  explicit FastDiv(int32_t d) : divisor_(d), shift_(std::bit_width(divisor_ - 1)) {
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + divisor_ - 1) / divisor_);
  }

  __host__ __device__ __forceinline__ uint32_t divisor() const { return divisor_; }

  __host__ __device__ __forceinline__ uint32_t Div(uint32_t n) const {
    return static_cast<uint32_t>(uint64_t{2 * n} * multiplier_ >> 32) >> shift_;
  }

  // Returns n / d, and n % d in *remainder.
  __host__ __device__ __forceinline__ uint32_t DivMod(uint32_t n, uint32_t* remainder) const {
    const uint32_t quotient = Div(n);
    *remainder = n - quotient * divisor_;
    return quotient;
  }

 private:
  uint32_t divisor_ = 1;
  uint32_t shift_ = 0;
  uint32_t multiplier_ = 1u << 31;
};

// ---- Host glue ----

// Calls f(std::type_identity<T>()) with the C++ type of `dtype`; f returns Error.
template <typename F>
Error DispatchFloat(DataType dtype, F&& f) {
  switch (dtype) {
    case DataType::kF16:
      return f(std::type_identity<__half>());
    case DataType::kBF16:
      return f(std::type_identity<__nv_bfloat16>());
    case DataType::kF32:
      return f(std::type_identity<float>());
    case DataType::kF64:
      return f(std::type_identity<double>());
    default:
      return Error::InvalidArgument("jaxnorm: dtype must be float16, bfloat16, float32 or float64, got FFI type " +
                                    std::to_string(static_cast<int>(dtype)));
  }
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_VEC_CUH_
