// Functions that row programs call, in plain C++ over machine.cuh and exchange.cuh.
#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
#define INFINITE64 __longlong_as_double(0x7ff0000000000000ll)
#define NOT_A_NUMBER64 __longlong_as_double(0x7fffffffffffffffll)
#define UNROLL _Pragma("unroll")

template <class T>
DEVICE T max_of(T a, T b) {
  return a > b ? a : b;
}
template <class T>
DEVICE T min_of(T a, T b) {
  return a < b ? a : b;
}

// ---- memory: kBytes (1, 2, 4, 8 or a multiple of 16) at an address that is a multiple of min(kBytes, 16) ----

template <int kBytes>
DEVICE void load(u32* words, const char* from) {  // from global memory that nobody writes
  if constexpr (kBytes >= 16) {
    UNROLL for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 q = __ldg((const uint4*)from + i);
      words[4 * i] = q.x, words[4 * i + 1] = q.y, words[4 * i + 2] = q.z, words[4 * i + 3] = q.w;
    }
  } else if constexpr (kBytes == 8) {
    const uint2 q = __ldg((const uint2*)from);
    words[0] = q.x, words[1] = q.y;
  } else if constexpr (kBytes == 4) {
    words[0] = __ldg((const u32*)from);
  } else if constexpr (kBytes == 2) {
    words[0] = __ldg((const unsigned short*)from);
  } else {
    words[0] = __ldg((const unsigned char*)from);
  }
}
template <int kBytes>
DEVICE void load_shared(u32* words, const char* from) {
  if constexpr (kBytes >= 16) {
    UNROLL for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 q = ((const uint4*)from)[i];
      words[4 * i] = q.x, words[4 * i + 1] = q.y, words[4 * i + 2] = q.z, words[4 * i + 3] = q.w;
    }
  } else if constexpr (kBytes == 8) {
    const uint2 q = *(const uint2*)from;
    words[0] = q.x, words[1] = q.y;
  } else if constexpr (kBytes == 4) {
    words[0] = *(const u32*)from;
  } else if constexpr (kBytes == 2) {
    words[0] = *(const unsigned short*)from;
  } else {
    words[0] = *(const unsigned char*)from;
  }
}
template <int kBytes>
DEVICE void store(char* to, const u32* words) {
  if constexpr (kBytes >= 16) {
    UNROLL for (int i = 0; i < kBytes / 16; ++i) {
      ((uint4*)to)[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
  } else if constexpr (kBytes == 8) {
    *(uint2*)to = make_uint2(words[0], words[1]);
  } else if constexpr (kBytes == 4) {
    *(u32*)to = words[0];
  } else if constexpr (kBytes == 2) {
    *(unsigned short*)to = (unsigned short)words[0];
  } else {
    *(unsigned char*)to = (unsigned char)words[0];
  }
}

// A number that the compiler knows, as an argument of a generic lambda.
template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};

// Loads kCount elements of kSize bytes, one by one, at the columns first, first + step, ... of a row. A column outside
// of the row is replaced by the nearest column in the row.
template <int kSize, int kCount>
DEVICE void load_elements(u32* words, const char* row, int first, int step, int columns) {
  UNROLL for (int v = 0; v < kCount; ++v) {
    const int column = min_of(max_of(first + step * v, 0), columns - 1);
    if constexpr (kSize == 8) {
      load<8>(words + 2 * v, row + (u64)column * 8);
    } else if constexpr (kSize == 4) {
      load<4>(words + v, row + (u64)column * 4);
    } else {
      u32 word;
      load<kSize>(&word, row + (u64)column * kSize);
      constexpr int kPerWord = 4 / kSize;
      const u32 shifted = word << (8 * kSize * (v % kPerWord));
      words[v / kPerWord] = v % kPerWord ? words[v / kPerWord] | shifted : shifted;
    }
  }
}
// load_elements for neighbouring columns that are all in the row.
template <int kSize, int kCount>
DEVICE void load_inside(u32* words, const char* row, int first) {
  UNROLL for (int v = 0; v < kCount; ++v) {
    u32* const place = words + v * kSize / 4;
    if constexpr (kSize >= 4) {
      load<kSize>(place, row + (u64)(first + v) * kSize);
    } else {
      u32 word;
      load<kSize>(&word, row + (u64)(first + v) * kSize);
      const int bits = 8 * kSize * (v % (4 / kSize));
      *place = bits ? *place | word << bits : word;
    }
  }
}
// A word of two elements, those outside of the row replaced by the ones of `other`.
DEVICE u32 halves_inside(u32 word, int column, int columns, u32 other) {
  const u32 low = (u32)column < (u32)columns ? 0xffffu : 0, high = (u32)(column + 1) < (u32)columns ? 0xffff0000u : 0;
  return (word & (low | high)) | (other & ~(low | high));
}
// Stores kCount elements, from `column` on, except for elements whose column is not in the row.
template <int kSize, int kCount>
DEVICE void store_edge(char* to, const u32* words, int column, int columns) {
  UNROLL for (int v = 0; v < kCount; ++v) {
    if ((u32)(column + v) < (u32)columns) {
      if constexpr (kSize == 8) {
        *(uint2*)(to + v * 8) = make_uint2(words[2 * v], words[2 * v + 1]);
      } else if constexpr (kSize == 4) {
        *(u32*)(to + v * 4) = words[v];
      } else if constexpr (kSize == 2) {
        *(unsigned short*)(to + v * 2) = (unsigned short)(words[v / 2] >> (16 * (v % 2)));
      } else {
        *(unsigned char*)(to + v) = (unsigned char)(words[v / 4] >> (8 * (v % 4)));
      }
    }
  }
}

// ---- conversions ----

DEVICE float low_bfloat16(u32 word) { return __uint_as_float(word << 16); }
DEVICE float high_bfloat16(u32 word) { return __uint_as_float(word & 0xffff0000u); }
DEVICE float round_to_bfloat16(float x) { return low_bfloat16(pack_bfloat16(x, 0.f)); }
DEVICE float round_to_float16(float x) { return low_float16(pack_float16(x, 0.f)); }
// x with kBits of mantissa, ties to even.
template <int kBits>
DEVICE float round_to_mantissa(float x) {
  const u32 bits = __float_as_uint(x), half = 1u << (22 - kBits);
  if (!(x - x == 0.f)) return x;
  return __uint_as_float((bits + half - 1 + ((bits >> (23 - kBits)) & 1u)) & ~(2 * half - 1));
}
template <int kBits>
DEVICE double round_to_mantissa(double x) {
  const u64 bits = (u64)__double_as_longlong(x), half = 1ull << (51 - kBits);
  if (!(x - x == 0.)) return x;
  return __longlong_as_double((long long)((bits + half - 1 + ((bits >> (52 - kBits)) & 1u)) & ~(2 * half - 1)));
}
DEVICE double to_double(u32 low, u32 high) { return __hiloint2double((int)high, (int)low); }
DEVICE u64 to_u64(u32 low, u32 high) { return ((u64)high << 32) | low; }

// An 8-bit float with kMantissa bits of mantissa and bias kBias. kLast is the largest finite code. A number that rounds
// beyond it is infinity (kLast + 1) where kInfinite, otherwise NaN. Ties go to the even code.
template <int kMantissa, int kBias, u32 kLast, bool kInfinite>
DEVICE u32 to_float8(float x) {
  const u32 sign = (__float_as_uint(x) >> 24) & 0x80u;
  const float a = fabsf(x);
  if (!(a == a)) return sign | 0x7fu;
  if (a >= 1e6f) return sign | (kInfinite ? kLast + 1 : 0x7fu);
  constexpr float kSmallest = (float)(1.0 / (1ull << (kBias - 1)));  // normal number
  u32 code;
  if (a < kSmallest) {
    constexpr float kStep = kSmallest / (float)(1 << kMantissa);
    code = (u32)rintf(a / kStep);
  } else {
    const u32 bits = __float_as_uint(a);
    const u32 cut = 23 - kMantissa;
    const u32 rounded = bits + ((1u << (cut - 1)) - 1) + ((bits >> cut) & 1u);
    code = (rounded >> cut) - ((127 - kBias) << kMantissa);
  }
  return sign | (code <= kLast ? code : kInfinite ? kLast + 1 : 0x7fu);
}
DEVICE u32 to_float8_e4m3fn(float x) { return to_float8<3, 7, 0x7e, false>(x); }
DEVICE u32 to_float8_e5m2(float x) { return to_float8<2, 15, 0x7b, true>(x); }
// Two 8-bit floats, the first one in the lower byte.
DEVICE u32 pack_float8_e4m3fn(float low, float high) {
#if __CUDA_ARCH__ >= 890
  // 464 is a tie between 448, the largest number, and the next code, which is NaN.
  return saturate_float8_e4m3fn(fabsf(low) > 464.f ? NOT_A_NUMBER : low, fabsf(high) > 464.f ? NOT_A_NUMBER : high);
#else
  return to_float8_e4m3fn(low) | to_float8_e4m3fn(high) << 8;
#endif
}
DEVICE u32 pack_float8_e5m2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  // 61440 is a tie between 57344, the largest number, and infinity, whose code follows.
  return saturate_float8_e5m2(low, high) + (fabsf(low) >= 61440.f) + ((fabsf(high) >= 61440.f) << 8);
#else
  return to_float8_e5m2(low) | to_float8_e5m2(high) << 8;
#endif
}
DEVICE float from_float8_e5m2(u32 byte) { return low_float16(byte << 8); }
DEVICE float from_float8_e4m3fn(u32 byte) {
  const u32 magnitude = byte & 0x7fu;
  if (magnitude == 0x7fu) return NOT_A_NUMBER;
  // The exponent's bias is 8 less than float16's, which a factor of 256 makes up for.
  const float value = low_float16(magnitude << 7) * 256.f;
  return byte & 0x80u ? -value : value;
}

// ---- means, and sums of squares about them ----

DEVICE float finite_or_zero(float x) { return fabsf(x) < INFINITE ? x : 0.f; }
DEVICE float middle_of(float a, float b, float c) { return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c)); }
DEVICE float square(float x) { return x * x; }
// From the sums of d and d^2, where d is the distance from an origin: the mean, and the sum of squares about the mean.
// The mean of n numbers is their sum times `share`, 1 / n.
DEVICE void mean_and_squares(float origin, float share, float& sum, float& squares) {
  const float rest = sum * share;
  squares = max_nan(0.f, squares - sum * rest);
  sum = origin + rest;
}

// ---- functions of one element ----

DEVICE float fast_exp(float x) { return exp2_fast(x * 1.442695041f); }
DEVICE float fast_logistic(float x) { return reciprocal_fast(1.f + exp2_fast(x * -1.442695041f)); }
DEVICE float fast_tanh(float x) {
  const float y = 1.f - 2.f * reciprocal_fast(1.f + exp2_fast(x * 2.885390082f));
  const float square = x * x;
  return square < 4e-4f ? x - x * square * .33333333f : y;  // small results would be a difference of two near 1
}
template <class T>
DEVICE T sign_of(T x) {
  return x > T(0) ? T(1) : x < T(0) ? T(-1) : x;
}
DEVICE double max_nan(double a, double b) { return a > b || a != a ? a : b; }
DEVICE double min_nan(double a, double b) { return a < b || a != a ? a : b; }
// Shifts by as many bits as the type has, or more, leave nothing but the sign.
template <class T>
DEVICE T shift_left(T x, T bits) {
  return (u64)bits < 8 * sizeof(T) ? (T)((u64)x << bits) : T(0);
}
template <class T>
DEVICE T shift_right(T x, T bits) {  // arithmetic for signed types, logical for unsigned ones
  return (u64)bits < 8 * sizeof(T) ? (T)(x >> bits) : x < T(0) ? (T)-1 : T(0);
}
template <class T>
DEVICE T integer_power(T x, int exponent) {
  T y = T(1);
  for (; exponent; exponent >>= 1, x = (T)(x * x)) {
    if (exponent & 1) y = (T)(y * x);
  }
  return y;
}
// Division and remainder of integers, defined also where C++ leaves them open, as XLA defines them.
template <class T>
DEVICE T divide(T a, T b) {
  if (b == T(0)) return (T)-1;
  if (T(-1) < T(0) && b == (T)-1) return (T)(0 - (u64)a);
  return (T)(a / b);
}
template <class T>
DEVICE T remainder_of(T a, T b) {
  if (b == T(0)) return a;
  if (T(-1) < T(0) && b == (T)-1) return T(0);
  return (T)(a % b);
}
// A float as an integer: rounded towards zero. NaN is 0. A number out of range is the nearest integer of the type.
template <class T, class F>
DEVICE T to_integer(F x, F lowest, F highest, T smallest, T largest) {
  return x != x ? T(0) : x <= lowest ? smallest : x >= highest ? largest : (T)x;
}

// Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Rotations and
// exclusive ors run in the ALU pipe alone, so additions leave it.
DEVICE uint2 threefry(u32 key0, u32 key1, u32 x0, u32 x1) {
  const u32 keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDAu};
  const int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  x0 = add_by_fma_pipe(x0, key0), x1 = add_by_fma_pipe(x1, key1);
  UNROLL for (int i = 0; i < 5; ++i) {
    UNROLL for (int j = 0; j < 4; ++j) {
      x0 = add_by_fma_pipe(x0, x1);
      x1 = __funnelshift_l(x1, x1, rotations[(i & 1) * 4 + j]);
      x1 ^= x0;
    }
    x0 = add_by_fma_pipe(x0, keys[(i + 1) % 3]);
    x1 = add_by_fma_pipe(x1, add_by_fma_pipe(keys[(i + 2) % 3], i + 1));
  }
  return make_uint2(x0, x1);
}
// jax.random's bits for the element at this position of its array (jax_threefry_partitionable).
DEVICE u32 random_bits32(u32 key0, u32 key1, u64 position) {
  const uint2 bits = threefry(key0, key1, (u32)(position >> 32), (u32)position);
  return bits.x ^ bits.y;
}
DEVICE u64 random_bits64(u32 key0, u32 key1, u64 position) {
  const uint2 bits = threefry(key0, key1, (u32)(position >> 32), (u32)position);
  return to_u64(bits.y, bits.x);
}
