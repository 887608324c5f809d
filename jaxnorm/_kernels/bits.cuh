// The ReLU's mask has one bit per element, and its rows begin on whole bytes. Conversion between bits in flat order and
// bits in rows. The plan makes Rows (jaxnorm/_kernels/layout.py).

// Repeats a byte in each byte of U, so that the bits of several rows are processed at once.
template <class U>
__device__ __forceinline__ constexpr U Repeat(u32 byte) {
  return static_cast<U>(static_cast<U>(0x01010101u) * byte);
}

// The place of an element in the mask: bit col % 8 of byte first_byte + col / 8.
struct Place {
  i64 first_byte;
  u32 col;
};

// Translates between elements and bytes of the mask near some place. Elements ("positions") and bytes are counted from
// the start of the row that the place lies in, and run on through the rows that follow; that fits 31 bits and FastDiv.
//
// A row above 2^30 columns is treated as if its first `cut` columns (whole bytes, leaving about 2^30) were missing. A
// tile that begins among them cannot see the row's end, so that only its column modulo 8 matters.
struct Rows {
  FastDiv near_cols, near_bytes;
  i64 cols, cut;

  // The place of an element. Beyond the first 2^31 it takes a 64-bit division, ~100 instructions.
  __device__ Place Find(i64 element) const {
    if (cut == 0 && element <= 0x7fffffff) {
      u32 col;
      const u32 row = near_cols.DivMod(static_cast<u32>(element), &col);
      return {i64{row} * near_bytes.divisor, col};
    }
    const i64 row = element / cols;
    const i64 true_col = element - row * cols;
    const i64 col = true_col < cut ? true_col % 8 : true_col - cut;
    return {row * ((cols + 7) / 8) + (true_col - col) / 8, static_cast<u32>(col)};
  }

  // The byte that holds the element at `position`.
  __device__ __forceinline__ u32 ByteOf(u32 position) const {
    u32 col;
    const u32 row = near_cols.DivMod(position, &col);
    return row * near_bytes.divisor + col / 8;
  }

  // The first byte none of whose elements lies before `position`.
  __device__ __forceinline__ u32 ByteFrom(u32 position) const {
    u32 col;
    const u32 row = near_cols.DivMod(position, &col);
    return row * near_bytes.divisor + (col + 7) / 8;
  }

  // The byte `byte` of the mask, made from the flat bits that begin at position `flat_begin`.
  template <class U>
  __device__ __forceinline__ U FlatToByte(const U* flat, u32 flat_begin, u32 byte) const {
    u32 byte_in_row;
    const u32 row = near_bytes.DivMod(byte, &byte_in_row);
    const u32 col = byte_in_row * 8;
    const u32 bit = row * near_cols.divisor + col - flat_begin, shift = bit % 8;
    const u32 kept = (1u << min(8u, near_cols.divisor - col)) - 1;
    const U low = flat[bit / 8] >> shift & Repeat<U>(0xff >> shift & kept);
    const U high = flat[bit / 8 + 1] << (8 - shift) & Repeat<U>(0xff << (8 - shift) & kept);
    return low | high;
  }

  // The kCount <= 8 flat bits from `position` on, taken from the bytes of the mask that begin with byte `bytes_begin`.
  template <int kCount, class U>
  __device__ __forceinline__ U BytesToFlat(const U* bytes, u32 bytes_begin, u32 position) const {
    u32 col;
    const u32 row = near_cols.DivMod(position, &col);
    const U* byte = bytes + (row * near_bytes.divisor + col / 8 - bytes_begin);
    U bits = 0;
    for (u32 have = 0; have < kCount; ++byte) {  // 1 or 2 rounds, and 1 more per row end
      const u32 take = min(min(8 - col % 8, near_cols.divisor - col), kCount - have);
      bits |= (*byte >> col % 8 & Repeat<U>((1u << take) - 1)) << have;
      have += take;
      col += take;
      if (col == near_cols.divisor) col = 0;
    }
    return bits;
  }
};
