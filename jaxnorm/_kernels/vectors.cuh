// Elements, and vectors of elements, for all kernels written by hand.
constexpr int kWarp = 32;
constexpr u32 kAllLanes = 0xffffffffu;
constexpr int kVecBytes = 16;    // widest load or store of one thread before sm_100
constexpr int kLineBytes = 128;  // line of the L2 cache

struct alignas(2) float16 {
  u16 bits;
};
struct alignas(2) bfloat16 {
  u16 bits;
};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <int kValue>
struct Number {
  __device__ constexpr operator int() const { return kValue; }
};

// The same bits as another type.
template <class To, class From>
DEVICE To BitsAs(const From& from) {
  return __builtin_bit_cast(To, from);
}

// The type in which values of an element type are summed and scaled: float, or double for double.
template <class E>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <class E>
using Acc = typename AccOf<E>::type;

DEVICE float ToAcc(float16 x) { return low_float16(x.bits); }
DEVICE float ToAcc(bfloat16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE float ToAcc(float x) { return x; }
DEVICE double ToAcc(double x) { return x; }

// 1 / x for x > 0, to the last bit but one.
DEVICE float Reciprocal(float x) {
  const float guess = reciprocal_fast(x);
  return fmaf(guess, fmaf(-x, guess, 1.f), guess);
}
DEVICE double Reciprocal(double x) { return 1 / x; }

template <class E>
constexpr int kVecSize = kVecBytes / sizeof(E);

template <class E, int N>
struct alignas(sizeof(E) * N) Vec {
  E v[N];
};
template <int N>
struct Words {
  u32 w[N];
};

template <class E, int N>
DEVICE Vec<Acc<E>, N> ToAccAll(const Vec<E, N>& from) {
  Vec<Acc<E>, N> to;
  if constexpr (sizeof(E) == 2) {
    const auto words = BitsAs<Words<N / 2>>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const u32 word = words.w[i / 2];
      if constexpr (kSame<E, float16>) {
        to.v[i] = i % 2 == 0 ? low_float16(word) : high_float16(word);
      } else {
        to.v[i] = __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to.v[i] = from.v[i];
  }
  return to;
}

// Rounds to nearest, ties to even.
template <class E, int N>
DEVICE Vec<E, N> RoundVec(const Acc<E> (&values)[N]) {
  if constexpr (sizeof(E) == 2) {
    Words<N / 2> words;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float low = values[2 * i], high = values[2 * i + 1];
      words.w[i] = kSame<E, float16> ? pack_float16(low, high) : pack_bfloat16(low, high);
    }
    return BitsAs<Vec<E, N>>(words);
  } else {
    Vec<E, N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) out.v[i] = values[i];
    return out;
  }
}

// max(v, 0). NaN stays NaN.
template <class E, int N>
DEVICE Vec<E, N> Relu(Vec<E, N> v) {
  if constexpr (sizeof(E) == 2) {
    auto words = BitsAs<Words<N / 2>>(v);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      words.w[i] = kSame<E, float16> ? max_nan_float16(words.w[i], 0) : max_nan_bfloat16(words.w[i], 0);
    }
    return BitsAs<Vec<E, N>>(words);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) v.v[i] = v.v[i] <= 0 ? E{} : v.v[i];  // false for NaN
    return v;
  }
}

// Relu(RoundVec<E>(values)): the conversion to a 16-bit type does both.
template <class E, int N>
DEVICE Vec<E, N> RoundRelu(const Acc<E> (&values)[N]) {
  if constexpr (sizeof(E) == 2) {
    Words<N / 2> words;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float low = values[2 * i], high = values[2 * i + 1];
      words.w[i] = kSame<E, float16> ? PackReluFloat16(low, high) : PackReluBfloat16(low, high);
    }
    return BitsAs<Vec<E, N>>(words);
  } else {
    return Relu(RoundVec<E>(values));
  }
}

// Bit j is v.v[j] > 0.
template <class E, int N>
DEVICE u32 PositiveBits(const Vec<E, N>& v) {
  u32 bits = 0;
  if constexpr (sizeof(E) == 2) {
    const auto words = BitsAs<Words<N / 2>>(v);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const u32 mask = kSame<E, float16> ? PositiveHalvesFloat16(words.w[i]) : PositiveHalvesBfloat16(words.w[i]);
      bits |= mask & (1u << 2 * i | 1u << (2 * i + 17));  // bits of the lower and of the upper half, still 16 apart
    }
    return (bits | bits >> 16) & 0xffff;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) bits |= (u32)(v.v[i] > 0) << i;
    return bits;
  }
}

DEVICE bool IsVecAligned(const void* p) { return (u64)p % kVecBytes == 0; }

// 16 bytes from an aligned address in global memory that the kernel does not write.
template <class E>
DEVICE Vec<E, kVecSize<E>> LoadVec(const E* p) {
  return BitsAs<Vec<E, kVecSize<E>>>(__ldg((const uint4*)p));
}

// Applies f to each word of `value`.
template <class P, class F>
DEVICE P MapWords(P value, F f) {
  auto words = BitsAs<Words<sizeof(P) / sizeof(u32)>>(value);
#pragma unroll
  for (u32& word : words.w) word = f(word);
  return BitsAs<P>(words);
}

template <class P>
DEVICE P ShuffleXor(P value, int offset) {
  return MapWords(value, [=](u32 word) { return __shfl_xor_sync(kAllLanes, word, offset); });
}

// Adds neighbours, then their sums, and so on: additions that do not wait for each other. N is a power of two.
template <class P, int N>
DEVICE P TreeSum(const P (&numbers)[N]) {
  if constexpr (N == 1) {
    return numbers[0];
  } else {
    P pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs[i] = numbers[2 * i] + numbers[2 * i + 1];
    return TreeSum(pairs);
  }
}

// n / d for 0 <= n < 2^31, by a multiplication and a shift that the plan computes (jaxnorm/_kernels/layout.py).
struct FastDiv {
  u32 divisor, shift, multiplier;

  __device__ __forceinline__ u32 Div(u32 n) const { return (u32)((u64)(2 * n) * multiplier >> 32) >> shift; }
  // Returns n / d, and n % d in *remainder.
  __device__ __forceinline__ u32 DivMod(u32 n, u32* remainder) const {
    const u32 quotient = Div(n);
    *remainder = n - quotient * divisor;
    return quotient;
  }
};

// Not inline: 64-bit divisions are long, and kernels whose code does not fit the instruction cache start slowly.
static __device__ __noinline__ i64 SlowDivide(i64 a, i64 b) { return a / b; }
