// Memory access of quant.h; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/quant/quant_math.h>
#include <kernels/quant/quant_variants.h>
#include <kernels/quant/quant_wide.h>

#include <emmintrin.h>

#include <type_traits>

namespace zeroth::kernels {
namespace {

/// Elements whose codes and sums are in the L1 cache at once.
constexpr std::int64_t kCodeTile = 1024;
/// Sources whose sum stays in registers.
constexpr int kFusedSources = 8;
/// Elements whose codes are made, or read, at once; 0 for single lanes.
template <template <class> class V>
constexpr std::int64_t kCodesOfGroup = WideCodes<V>::kThere ? kGroupVectors * V<float>::kLanes : 0;
/// Bytes of the codes of i elements, of whole bytes.
template <class Codes>
constexpr std::int64_t bytes_of_codes(std::int64_t i) {
  return Codes::kHalf ? i / 2 : i;
}
/// What the messages of a block are divided by, and 1 / scale.
struct BlockScale {
  float scale;
  float inverse;
};

/// Codes of 4 bits out of codes of 8, and back. `n` elements, from an even one on. 32 at once, by instructions that
/// every x86-64 processor has.
ZR_INLINE void pack_pairs(const std::int8_t* codes, std::uint8_t* pairs, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const auto pack = [&](std::int64_t at) {
      const __m128i two = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + at));
      return _mm_or_si128(_mm_and_si128(two, _mm_set1_epi16(0x0f)),
                          _mm_and_si128(_mm_srli_epi16(two, 4), _mm_set1_epi16(0xf0)));
    };
    _mm_storeu_si128(reinterpret_cast<__m128i*>(pairs + i / 2), _mm_packus_epi16(pack(i), pack(i + 16)));
  }
  for (; i + 1 < n; i += 2) pairs[i / 2] = pair_of(codes[i], codes[i + 1]);
  if (i < n) pairs[i / 2] = pair_of(codes[i], 0);
}
ZR_INLINE void unpack_pairs(const std::uint8_t* pairs, std::int8_t* codes, std::int64_t n) {
  std::int64_t i = 0;
  const __m128i sign = _mm_set1_epi8(8);
  for (; i + 32 <= n; i += 32) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs + i / 2));
    const __m128i low = _mm_and_si128(both, _mm_set1_epi8(0x0f));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), _mm_set1_epi8(0x0f));
    const auto store = [&](std::int64_t at, __m128i halves) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + at), _mm_sub_epi8(_mm_xor_si128(halves, sign), sign));
    };
    store(i, _mm_unpacklo_epi8(low, high));
    store(i + 16, _mm_unpackhi_epi8(low, high));
  }
  for (; i < n; ++i) codes[i] = half_of(pairs[i / 2], i);
}

/// Codes of one group, of the quotients of its messages, which become the values of the codes.
template <template <class> class V, class Codes>
ZR_INLINE void store_group(V<float> (&quotient)[kGroupVectors], std::uint8_t* codes) {
  using S = WideCodes<V>;
  using Bits = typename S::Bits;
  Bits code[2];
  if constexpr (Codes::kInteger) {
    Bits number[kGroupVectors];
    for (int v = 0; v < kGroupVectors; ++v) {
      number[v] = S::nearest(quotient[v]);
      quotient[v] = S::number(number[v]);
    }
    for (int h = 0; h < 2; ++h) code[h] = S::words(number[2 * h], number[2 * h + 1]);
  } else {
    // As FloatCodes::rounded(): steps are the lowest bits of a sum whose last place is one. The code of k steps in
    // the binade e is k + e steps of its exponent, above those of the smallest binade.
    constexpr int kMantissa = Codes::kMantissaBits;
    constexpr auto kSmallest = __builtin_bit_cast(std::uint32_t, Codes::kSmallestNormal);
    constexpr std::uint32_t kToShift = (23U - kMantissa) << 23U | 0x400000U;
    Bits steps[kGroupVectors];
    Bits binade[kGroupVectors];
    for (int v = 0; v < kGroupVectors; ++v) {
      const Bits power = S::greater(S::both(S::bits_of(quotient[v]), S::splat(0x7f800000U)), S::splat(kSmallest));
      const Bits shift = S::plus(power, S::splat(kToShift));
      const V<float> sum = quotient[v] + S::of_bits(shift);
      steps[v] = S::minus(S::bits_of(sum), shift);
      binade[v] = S::template down<23 - kMantissa>(power);
      quotient[v] = sum - S::of_bits(shift);
    }
    for (int h = 0; h < 2; ++h) {
      const Bits count = S::words(steps[2 * h], steps[2 * h + 1]);
      const Bits first = S::words(binade[2 * h], binade[2 * h + 1]);
      const Bits magnitude =
          S::words_plus(S::words_plus(S::words_magnitude(count), first),
                        S::splat_words(-static_cast<int>(kSmallest >> (23U - static_cast<unsigned>(kMantissa)))));
      const Bits sign = S::both(S::words_sign(count), S::splat_words(-(1 << Codes::kMagnitudeBits)));
      code[h] = S::words_plus(magnitude, sign);
    }
  }
  if constexpr (Codes::kHalf) {
    S::store_halves(code[0], code[1], codes);
  } else {
    S::store_bytes(code[0], code[1], codes);
  }
}

/// quantize_rest() of whole groups, rounded to nearest, from the first element on. Returns the elements that are done.
template <template <class> class V, class Codes, bool kError, class Message>
ZR_INLINE std::int64_t quantize_groups(const QuantizeArgs& args, std::int64_t begin, std::int64_t n,
                                       const BlockScale& by, const Message& message_at) {
  if (args.stochastic.enabled || !(by.scale >= kLeastFast && by.scale <= kMostFast)) return 0;
  using W = V<float>;
  std::uint8_t* const codes = args.codes + bytes_of_codes<Codes>(begin);
  float* const error = args.error + begin;
  const W divisor = W::splat(by.scale);
  const W inverse = W::splat(by.inverse);
  std::int64_t i = 0;
  for (; i + kCodesOfGroup<V> <= n; i += kCodesOfGroup<V>) {
    W message[kGroupVectors];
    W value[kGroupVectors];
    for (int v = 0; v < kGroupVectors; ++v) {
      message[v] = message_at(Width<W>{}, i + v * W::kLanes);
      value[v] = WideCodes<V>::quotient(message[v], divisor, inverse);
    }
    store_group<V, Codes>(value, codes + bytes_of_codes<Codes>(i));
    if constexpr (kError) {
      for (int v = 0; v < kGroupVectors; ++v) error_of(message[v], value[v], divisor).store(error + i + v * W::kLanes);
    }
  }
  return i;
}

/// The codes of elements [first, n) of a block, by single vectors and divisions.
template <template <class> class V, class Codes, bool kError, class Message>
ZR_INLINE void quantize_rest(const QuantizeArgs& args, std::int64_t begin, std::int64_t first, std::int64_t n,
                             float scale, const Message& message_at) {
  const float divisor = divisor_of(scale);
  std::uint8_t* const codes = args.codes + code_bytes(begin, args.format);
  for (std::int64_t tile = first; tile < n; tile += kCodeTile) {
    const std::int64_t count = n - tile < kCodeTile ? n - tile : kCodeTile;
    alignas(64) std::int8_t wide[kCodeTile];
    std::int8_t* const to = Codes::kHalf ? wide : reinterpret_cast<std::int8_t*>(codes + tile);
    if (args.stochastic.enabled && scale > 0.0F) {
      for_each_vector<V, float>(0, count, [&](auto width, std::int64_t k) {
        using W = typename decltype(width)::Vector;
        const W message = message_at(width, tile + k);
        const auto element = args.stochastic.first + static_cast<std::uint32_t>(begin + tile + k);
        const W uniform = W::uniforms(args.stochastic.seed, element);
        const W value = stochastic_value_of<Codes>(message, W::splat(divisor), uniform);
        Codes::store(value, to + k);
        if constexpr (kError) error_of(message, value, W::splat(scale)).store(args.error + begin + tile + k);
      });
    } else {
      for_each_vector<V, float>(0, count, [&](auto width, std::int64_t k) {
        using W = typename decltype(width)::Vector;
        const W message = message_at(width, tile + k);
        const W value = value_of<Codes>(message, W::splat(divisor));
        Codes::store(value, to + k);
        if constexpr (kError) error_of(message, value, W::splat(scale)).store(args.error + begin + tile + k);
      });
    }
    if constexpr (Codes::kHalf) pack_pairs(wide, codes + tile / 2, count);
  }
}

/// The greatest magnitude() of the messages of a block.
template <template <class> class V, class Message>
ZR_INLINE float greatest_of(std::int64_t n, const Message& message_at) {
  using Vector = V<float>;
  constexpr std::int64_t kAtOnce = 4;
  Vector greatest[kAtOnce];
  for (Vector& one : greatest) one = Vector::splat(0.0F);
  std::int64_t i = 0;
  for (; i + kAtOnce * Vector::kLanes <= n; i += kAtOnce * Vector::kLanes) {
    for (std::int64_t v = 0; v < kAtOnce; ++v)
      greatest[v] = Vector::greater(greatest[v], message_at(Width<Vector>{}, i + v * Vector::kLanes).magnitude());
  }
  for (std::int64_t v = 1; v < kAtOnce; ++v) greatest[0] = Vector::greater(greatest[0], greatest[v]);
  Lane<float> rest{greatest[0].greatest()};
  for (; i < n; ++i) rest = Lane<float>::greater(rest, message_at(Width<Lane<float>>{}, i).magnitude());
  return rest.v;
}

/// All codes of a range. prepare(begin, n) is called for each block, in their order, before its first
/// load(begin, width, i), which gives the source of its element i; kError: args.error is there.
template <template <class> class V, class Codes, bool kError, class Prepare, class Load>
ZR_INLINE void quantize_blocks(const QuantizeArgs& args, const Prepare& prepare, const Load& load) {
  const auto messages_of = [&](std::int64_t begin) {
    return [&load, begin, error = args.error + begin](auto width, std::int64_t i) {
      using W = typename decltype(width)::Vector;
      W message = load(begin, width, i);
      if constexpr (kError) message = message + W::load(error + i);
      return message;
    };
  };
  const auto length_of = [&](std::int64_t begin) { return args.n - begin < args.block ? args.n - begin : args.block; };
  const auto scale_at = [&](std::int64_t begin) {
    prepare(begin, length_of(begin));
    const float scale = scale_of(greatest_of<V>(length_of(begin), messages_of(begin)), Codes::kMost);
    return BlockScale{scale, 1.0F / scale};
  };
  if (args.n == 0) return;
  BlockScale next = scale_at(0);
  for (std::int64_t begin = 0; begin < args.n; begin += args.block) {
    const BlockScale by = next;
    const std::int64_t n = length_of(begin);
    // The greatest of the next block is looked for before the codes of this one: neither waits for the other's scale.
    if (begin + args.block < args.n) next = scale_at(begin + args.block);
    args.scales[begin / args.block] = by.scale;
    if (by.scale != by.scale) {
      __builtin_memset(args.codes + bytes_of_codes<Codes>(begin), 0,
                       static_cast<std::size_t>(code_bytes(n, args.format)));
      continue;
    }
    std::int64_t done = 0;
    if constexpr (WideCodes<V>::kThere)
      done = quantize_groups<V, Codes, kError>(args, begin, n, by, messages_of(begin));
    if (done < n) quantize_rest<V, Codes, kError>(args, begin, done, n, by.scale, messages_of(begin));
  }
}

template <template <class> class V>
void quantize_any(const QuantizeArgs& args) {
  with_coded_type(args.src_dtype, [&](auto type) {
    const auto* const src = static_cast<const typename decltype(type)::Element*>(args.src);
    with_codes(args.format, [&](auto format) {
      with_flag(args.error != nullptr, [&](auto has_error) {
        quantize_blocks<V, decltype(format), decltype(has_error)::kValue>(
            args, [](std::int64_t /*begin*/, std::int64_t /*n*/) {},
            [src](std::int64_t begin, auto width, std::int64_t i) {
              return decltype(width)::Vector::load(src + begin + i);
            });
      });
    });
  });
}

/// The sums of elements [begin, begin + n), inside of one block, at `to`, by single vectors.
template <template <class> class V, class Codes>
void sum_singly(const DequantizeArgs& args, std::int64_t begin, std::int64_t n, float* to) {
  alignas(64) std::int8_t wide[kCodeTile];
  for (int source = 0; source < args.num_sources; ++source) {
    const QuantSource& from = args.sources[source];
    const float scale = from.scales[begin / args.block];
    const auto* codes = reinterpret_cast<const std::int8_t*>(from.codes + code_bytes(begin, args.format));
    if constexpr (Codes::kHalf) {
      unpack_pairs(from.codes + code_bytes(begin, args.format), wide, n);
      codes = wide;
    }
    const bool last = source + 1 == args.num_sources;
    for_each_vector<V, float>(0, n, [&](auto width, std::int64_t i) {
      using W = typename decltype(width)::Vector;
      W value = Codes::template load<W>(codes + i) * W::splat(scale);
      if (source > 0) value = W::load(to + i) + value;
      if (last) value = canonical(value * W::splat(args.factor));
      value.store(to + i);
    });
  }
}

/// A source of one block, for whole groups: values(i, to) are those of the codes from element i of the range on, times
/// the block's scale, in an order that in_order() puts right. Codes of 8 bits.
template <template <class> class V, class Codes>
struct ByteSource {
  const std::uint8_t* codes;
  V<float> scale;

  static ZR_INLINE bool takes(float given) {
    // kHalfScale must not make an infinity of it.
    return Codes::kInteger || !(given * kHalfScale - given * kHalfScale != 0.0F) || given - given != 0.0F;
  }
  static ZR_INLINE ByteSource of(const std::uint8_t* codes, float scale) {
    return {codes, V<float>::splat(Codes::kInteger ? scale : scale * kHalfScale)};
  }
  ZR_INLINE void values(std::int64_t i, V<float> (&to)[kGroupVectors]) const {
    const std::uint8_t* const from = codes + i;
    if constexpr (Codes::kInteger) {
      for (int v = 0; v < kGroupVectors; ++v)
        to[v] = V<float>::load(reinterpret_cast<const std::int8_t*>(from + v * V<float>::kLanes));
    } else {
      for (int v = 0; v < kGroupVectors; v += 2) WideCodes<V>::load_e4m3(from + v * V<float>::kLanes, to[v], to[v + 1]);
    }
    for (V<float>& one : to) one = one * scale;
  }
  static ZR_INLINE void in_order(V<float> (& /*values*/)[kGroupVectors]) {}
};

/// The values of codes of 4 bits, of 0 to 7 and of those with the upper bit.
template <class Codes>
struct HalfValues {
  alignas(64) static constexpr float kOf[16] = {
      0.0F,
      Codes::kInteger ? 1.0F : 0.25F,
      Codes::kInteger ? 2.0F : 0.5F,
      Codes::kInteger ? 3.0F : 1.0F,
      Codes::kInteger ? 4.0F : 2.0F,
      Codes::kInteger ? 5.0F : 4.0F,
      Codes::kInteger ? 6.0F : 8.0F,
      Codes::kInteger ? 7.0F : 16.0F,
      Codes::kInteger ? -8.0F : -0.0F,
      Codes::kInteger ? -7.0F : -0.25F,
      Codes::kInteger ? -6.0F : -0.5F,
      Codes::kInteger ? -5.0F : -1.0F,
      Codes::kInteger ? -4.0F : -2.0F,
      Codes::kInteger ? -3.0F : -4.0F,
      Codes::kInteger ? -2.0F : -8.0F,
      Codes::kInteger ? -1.0F : -16.0F,
  };
};

/// The same for codes of 4 bits: products come from a table. Of each pair of vectors the first has even elements.
template <template <class> class V, class Codes>
struct HalfSource {
  using Table = typename WideCodes<V>::Table;
  const std::uint8_t* codes;
  Table table;

  static ZR_INLINE bool takes(float /*scale*/) { return true; }
  static ZR_INLINE HalfSource of(const std::uint8_t* codes, float scale) {
    return {codes, Table::of(HalfValues<Codes>::kOf, scale)};
  }
  ZR_INLINE void values(std::int64_t i, V<float> (&to)[kGroupVectors]) const {
    for (int v = 0; v < kGroupVectors; v += 2) {
      const auto pairs = WideCodes<V>::load_pairs(codes + (i + v * V<float>::kLanes) / 2);
      to[v] = table.lower(pairs);
      to[v + 1] = table.upper(pairs);
    }
  }
  static ZR_INLINE void in_order(V<float> (&values)[kGroupVectors]) {
    for (int v = 0; v < kGroupVectors; v += 2) WideCodes<V>::in_order(values[v], values[v + 1]);
  }
};

/// The sums of whole groups of [begin, begin + n), inside of one block: write(i, value) gets the vector of element
/// begin + i. Returns the elements that are done: 0 if a source has a scale that groups cannot take.
template <template <class> class V, class Codes, class Write>
ZR_INLINE std::int64_t sum_groups(const DequantizeArgs& args, std::int64_t begin, std::int64_t n, const Write& write) {
  using Source = std::conditional_t<Codes::kHalf, HalfSource<V, Codes>, ByteSource<V, Codes>>;
  using W = V<float>;
  for (int source = 0; source < args.num_sources; ++source) {
    if (!Source::takes(args.sources[source].scales[begin / args.block])) return 0;
  }
  alignas(64) float between[kCodeTile];  // sums of the sources before
  const std::int64_t end = n / kCodesOfGroup<V> * kCodesOfGroup<V>;
  const W factor = W::splat(args.factor);
  for (int first = 0; first < args.num_sources; first += kFusedSources) {
    const int count = args.num_sources - first < kFusedSources ? args.num_sources - first : kFusedSources;
    const bool last = first + count == args.num_sources;
    Source sources[kFusedSources];
    for (int k = 0; k < count; ++k) {
      const QuantSource& from = args.sources[first + k];
      sources[k] = Source::of(from.codes + bytes_of_codes<Codes>(begin), from.scales[begin / args.block]);
    }
    for (std::int64_t i = 0; i < end; i += kCodesOfGroup<V>) {
      W sum[kGroupVectors];
      sources[0].values(i, sum);
      if (first > 0) {
        for (int v = 0; v < kGroupVectors; ++v) sum[v] = W::load(between + i + v * W::kLanes) + sum[v];
      }
      for (int k = 1; k < count; ++k) {
        W more[kGroupVectors];
        sources[k].values(i, more);
        for (int v = 0; v < kGroupVectors; ++v) sum[v] = sum[v] + more[v];
      }
      if (!last) {
        for (int v = 0; v < kGroupVectors; ++v) sum[v].store(between + i + v * W::kLanes);
        continue;
      }
      Source::in_order(sum);
      for (int v = 0; v < kGroupVectors; ++v) write(i + v * W::kLanes, canonical(sum[v] * factor));
    }
  }
  return end;
}

/// The sums of elements [begin, begin + n), at most kCodeTile, inside of one block, at `dst`.
template <template <class> class V, class Codes, bool kStream, class Element>
ZR_INLINE void sum_tile(const DequantizeArgs& args, std::int64_t begin, std::int64_t n, Element* dst) {
  std::int64_t done = 0;
  if constexpr (WideCodes<V>::kThere) {
    done =
        sum_groups<V, Codes>(args, begin, n, [&](std::int64_t i, V<float> value) { write<kStream>(value, dst + i); });
  }
  if (done == n) return;
  alignas(64) float sum[kCodeTile];
  sum_singly<V, Codes>(args, begin + done, n - done, sum);
  for_each_vector<V, float>(
      done, n, [&](auto width, std::int64_t i) { decltype(width)::Vector::load(sum + i - done).store(dst + i); });
}

/// Calls body(at, n) for the tiles of the range, each inside of one block.
template <class Body>
ZR_INLINE void for_each_tile(std::int64_t begin, std::int64_t end, std::int64_t block, const Body& body) {
  for (; begin < end; begin += block) {
    const std::int64_t last = end - begin < block ? end : begin + block;
    for (std::int64_t at = begin; at < last; at += kCodeTile) body(at, last - at < kCodeTile ? last - at : kCodeTile);
  }
}

template <template <class> class V>
void dequantize_any(const DequantizeArgs& args) {
  with_coded_type(args.dst_dtype, [&](auto type) {
    auto* const dst = static_cast<typename decltype(type)::Element*>(args.dst);
    // Blocks are whole vectors, so all vectors lie as the first one does.
    with_flag(wants_streaming(dst, args.n) && elements_until_aligned(dst, args.n) == 0, [&](auto streams) {
      constexpr bool kStream = decltype(streams)::kValue && WideCodes<V>::kThere;
      with_codes(args.format, [&](auto format) {
        for_each_tile(0, args.n, args.block, [&](std::int64_t at, std::int64_t n) {
          sum_tile<V, decltype(format), kStream>(args, at, n, dst + at);
        });
      });
      if constexpr (kStream) stream_fence();
    });
  });
}

/// The sums of one block at `to`.
template <template <class> class V>
void sum_block(const DequantizeArgs& args, std::int64_t begin, std::int64_t n, float* to) {
  with_codes(args.format, [&](auto format) {
    for_each_tile(begin, begin + n, args.block, [&](std::int64_t at, std::int64_t count) {
      sum_tile<V, decltype(format), false>(args, at, count, to + at - begin);
    });
  });
}

template <template <class> class V, class Codes, bool kError>
void requantize_range(const RequantizeArgs& args) {
  alignas(64) float own[2][kMostRequantized];  // of a block, and of the next one
  auto* const kept = static_cast<float*>(args.sum.dst);
  const auto sum_of = [&](std::int64_t begin) {
    return kept != nullptr ? kept + begin : own[begin / args.sum.block % 2];
  };
  quantize_blocks<V, Codes, kError>(
      args.quantize, [&](std::int64_t begin, std::int64_t n) { sum_block<V>(args.sum, begin, n, sum_of(begin)); },
      [&](std::int64_t begin, auto width, std::int64_t i) { return decltype(width)::Vector::load(sum_of(begin) + i); });
}

template <template <class> class V>
void requantize_any(const RequantizeArgs& args) {
  with_codes(args.quantize.format, [&](auto format) {
    with_flag(args.quantize.error != nullptr,
              [&](auto has_error) { requantize_range<V, decltype(format), decltype(has_error)::kValue>(args); });
  });
}

}  // namespace
}  // namespace zeroth::kernels
