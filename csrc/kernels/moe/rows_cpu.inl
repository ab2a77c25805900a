// Memory access of permute.h and of the jitter of dispatch.h; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/moe/dispatch_math.h>
#include <kernels/moe/dispatch_variants.h>
#include <kernels/moe/permute_math.h>
#include <kernels/moe/permute_variants.h>

namespace zeroth::kernels {
namespace {

/// Calls body(in) with the type of the rows.
template <class Body>
ZR_INLINE void with_row_type(DType dtype, const void* in, const Body& body) {
  if (dtype == DType::kFloat64) return body(static_cast<const double*>(in));
  if (dtype == DType::kBFloat16) return body(static_cast<const BFloat16*>(in));
  if (dtype == DType::kFloat16) return body(static_cast<const Float16*>(in));
  body(static_cast<const float*>(in));
}

/// Rows of a range that is written past the caches: a row of these bytes or more is streamed.
constexpr std::int64_t kStreamedRow = 512;

/// So many bytes of rows are asked for ahead.
constexpr std::int64_t kRowsAhead = std::int64_t{32} << 10;

/// A row as bytes. kStream: past the caches from the first line that is whole. Rows lie anywhere, so the processor does
/// not foresee them: while a row is copied the lines of a later one (`far`) are brought to L2, and those of the next
/// one
/// (`near`) to L1.
template <class B, bool kStream>
ZR_INLINE void copy_row(std::uint32_t* to, const std::uint32_t* from, std::int64_t words, const std::uint32_t* near,
                        const std::uint32_t* far) {
  std::int64_t i = 0;
  if constexpr (kStream) {
    const std::int64_t head = elements_until_aligned(to, words);
    for (; i < head; ++i) to[i] = from[i];
  }
  constexpr std::int64_t kLine = 16;
  for (; i + kLine <= words; i += kLine) {
    __builtin_prefetch(far + i, 0, 2);
    __builtin_prefetch(near + i, 0, 3);
    for (std::int64_t k = 0; k < kLine; k += B::kLanes) write<kStream>(B::load(from + i + k), to + i + k);
  }
  for (; i + B::kLanes <= words; i += B::kLanes) write<kStream>(B::load(from + i), to + i);
  for (; i < words; ++i) to[i] = from[i];
}

template <template <class> class V>
void permute_bytes(const PermuteArgs& args) {
  const auto row_bytes = args.width * (args.dtype == DType::kFloat64 ? 8 : (args.dtype == DType::kFloat32 ? 4 : 2));
  const auto* const in = static_cast<const unsigned char*>(args.in);
  auto* const out = static_cast<unsigned char*>(args.out);
  using B = V<std::uint32_t>;
  const auto in_words = reinterpret_cast<std::uintptr_t>(in) % 4 == 0 && reinterpret_cast<std::uintptr_t>(out) % 4 == 0;
  if (!in_words || row_bytes % 4 != 0 || row_bytes == 0) {
    for (std::int64_t slot = 0; slot < args.slots; ++slot) {
      __builtin_memcpy(out + slot * row_bytes, in + args.source_of[slot] / args.k * row_bytes,
                       static_cast<std::size_t>(row_bytes));
    }
    return;
  }
  const bool streams = row_bytes >= kStreamedRow && args.slots * row_bytes >= kStreamBytes;
  with_flag(streams, [&](auto stream) {
    const std::int64_t ahead = kRowsAhead / row_bytes + 1;
    const auto row_of = [&](std::int64_t slot) {
      const std::int64_t source = args.source_of[slot < args.slots ? slot : args.slots - 1];
      return reinterpret_cast<const std::uint32_t*>(in + source / args.k * row_bytes);
    };
    for (std::int64_t slot = 0; slot < args.slots; ++slot) {
      copy_row<B, decltype(stream)::kValue>(reinterpret_cast<std::uint32_t*>(out + slot * row_bytes), row_of(slot),
                                            row_bytes / 4, row_of(slot + 1), row_of(slot + ahead));
    }
  });
  if (streams) stream_fence();
}

/// Vectors that are computed side by side: each waits for a multiply-add of its own.
constexpr std::int64_t kRowBlock = 4;

/// Asks for the lines of a block of columns of a later row.
template <int kLocality, class T>
ZR_INLINE void fetch_block(const T* from, std::int64_t bytes) {
  const auto* const lines = reinterpret_cast<const unsigned char*>(from);
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(lines + i, 0, kLocality);
}

/// Rows of `bytes` each, `rows` of them in all, are written past the caches.
ZR_INLINE bool streams_rows(const void* out, std::int64_t element, std::int64_t bytes, std::int64_t rows) {
  return bytes >= kStreamedRow && rows * bytes >= kStreamBytes && reinterpret_cast<std::uintptr_t>(out) % element == 0;
}

/// Columns of a row that is written: body(Width, stores, c, vectors) for single ones, vectors, and blocks of kRowBlock
/// vectors. `stores` as in for_each_written().
template <template <class> class V, class Number, bool kStream, class T, class Body>
ZR_INLINE void for_each_column(const T* out, std::int64_t width, const Body& body) {
  constexpr std::int64_t kLanes = V<Number>::kLanes;
  using Stores = std::conditional_t<kStream, StreamingStores, CachedStores>;
  using One = std::integral_constant<std::int64_t, 1>;
  std::int64_t c = 0;
  if constexpr (kStream) {
    const std::int64_t head = elements_until_aligned(out, width);
    for (; c < head; ++c) body(Width<Lane<Number>>{}, CachedStores{}, c, One{});
  }
  constexpr std::int64_t kBlock = kRowBlock * kLanes;
  for (; c + kBlock <= width; c += kBlock)
    body(Width<V<Number>>{}, Stores{}, c, std::integral_constant<std::int64_t, kRowBlock>{});
  for (; c + kLanes <= width; c += kLanes) body(Width<V<Number>>{}, Stores{}, c, One{});
  for (; c < width; ++c) body(Width<Lane<Number>>{}, CachedStores{}, c, One{});
}

template <template <class> class V>
void permute_any(const PermuteArgs& args) {
  if (args.weights == nullptr) return permute_bytes<V>(args);
  with_row_type(args.dtype, args.in, [&](const auto* in) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(in)>>;
    using Number = RowNumber<T>;
    auto* const out = static_cast<T*>(args.out);
    const auto* const weights = static_cast<const Number*>(args.weights);
    const std::int64_t row_bytes = args.width * static_cast<std::int64_t>(sizeof(T));
    const std::int64_t ahead = kRowsAhead / (row_bytes + 1) + 1;
    const auto row_of = [&](std::int64_t slot) {
      const std::int64_t source = args.source_of[slot < args.slots ? slot : args.slots - 1];
      return in + source / args.k * args.width;
    };
    const bool streams = streams_rows(out, sizeof(T), row_bytes, args.slots);
    with_flag(streams, [&](auto stream) {
      for (std::int64_t slot = 0; slot < args.slots; ++slot) {
        const T* const from = row_of(slot);
        const T* const near = row_of(slot + 1);
        const T* const far = row_of(slot + ahead);
        const Number weight = weights[args.source_of[slot]];
        T* const to = out + slot * args.width;
        for_each_column<V, Number, decltype(stream)::kValue>(
            to, args.width, [&](auto width, auto stores, std::int64_t c, auto vectors) {
              using W = typename decltype(width)::Vector;
              constexpr std::int64_t kVectors = decltype(vectors)::value;
              if constexpr (kVectors > 1) {
                fetch_block<2>(far + c, kVectors * W::kLanes * static_cast<std::int64_t>(sizeof(T)));
                fetch_block<3>(near + c, kVectors * W::kLanes * static_cast<std::int64_t>(sizeof(T)));
              }
              for (std::int64_t i = 0; i < kVectors; ++i) {
                const std::int64_t at = c + i * W::kLanes;
                write<decltype(stores)::kStream>(weighted(W::load(from + at), W::splat(weight)), to + at);
              }
            });
      }
    });
    if (streams) stream_fence();
  });
}

/// The rows of a token's slots, in the order of its choices, and their weights.
template <class T>
struct TokenRows {
  const T* row[64];
  RowNumber<T> weight[64];
  std::int64_t entry[64];  ///< j
  std::int64_t count;

  ZR_INLINE void find(const UnpermuteArgs& args, const T* in, std::int64_t t, const RowNumber<T>* weights) {
    const std::int32_t* const slots = args.slot_of + t * args.k;
    count = 0;
    for (std::int64_t j = 0; j < args.k; ++j) {
      if (slots[j] < 0) continue;
      row[count] = in + slots[j] * args.width;
      weight[count] = weights == nullptr ? RowNumber<T>{1} : weights[t * args.k + j];
      entry[count++] = j;
    }
  }
};

/// Where the rows of a later token lie; `in` for what it lacks.
template <class T>
struct LaterRows {
  const T* row[64];

  ZR_INLINE void find(const UnpermuteArgs& args, const T* in, std::int64_t t) {
    const std::int32_t* const slots = args.slot_of + (t < args.tokens ? t : args.tokens - 1) * args.k;
    for (std::int64_t j = 0; j < args.k; ++j) row[j] = in + (slots[j] < 0 ? 0 : slots[j]) * args.width;
  }
};

/// So many tokens ahead rows are asked for.
ZR_INLINE std::int64_t tokens_ahead(const UnpermuteArgs& args, std::int64_t row_bytes) {
  return kRowsAhead / (args.k * row_bytes + 1) + 1;
}

template <template <class> class V>
void unpermute_any(const UnpermuteArgs& args) {
  with_row_type(args.dtype, args.in, [&](const auto* in) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(in)>>;
    using Number = RowNumber<T>;
    auto* const out = static_cast<T*>(args.out);
    const auto* const weights = static_cast<const Number*>(args.weights);
    const std::int64_t row_bytes = args.width * static_cast<std::int64_t>(sizeof(T));
    const std::int64_t ahead = tokens_ahead(args, row_bytes);
    TokenRows<T> rows;
    LaterRows<T> later;
    const bool streams = streams_rows(out, sizeof(T), row_bytes, args.tokens);
    with_flag(streams, [&](auto stream) {
      for (std::int64_t t = 0; t < args.tokens; ++t) {
        rows.find(args, in, t, weights);
        later.find(args, in, t + ahead);
        T* const to = out + t * args.width;
        for_each_column<V, Number, decltype(stream)::kValue>(
            to, args.width, [&](auto width, auto stores, std::int64_t c, auto vectors) {
              using W = typename decltype(width)::Vector;
              constexpr std::int64_t kVectors = decltype(vectors)::value;
              if constexpr (kVectors > 1) {
                for (std::int64_t j = 0; j < args.k; ++j)
                  fetch_block<2>(later.row[j] + c, kVectors * W::kLanes * static_cast<std::int64_t>(sizeof(T)));
              }
              W sums[kVectors];
              for (auto& sum : sums) sum = W::splat(Number{0});
              for (std::int64_t j = 0; j < rows.count; ++j) {
                const W weight = W::splat(rows.weight[j]);
                const T* const from = rows.row[j] + c;
                for (std::int64_t i = 0; i < kVectors; ++i)
                  sums[i] = fused(weight, W::load(from + i * W::kLanes), sums[i]);
              }
              for (std::int64_t i = 0; i < kVectors; ++i)
                write<decltype(stores)::kStream>(canonical(sums[i]), to + c + i * W::kLanes);
            });
      }
    });
    if (streams) stream_fence();
  });
}

template <template <class> class V>
void unpermute_weights_any(const UnpermuteArgs& args) {
  with_row_type(args.dtype, args.in, [&](const auto* in) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(in)>>;
    using Number = RowNumber<T>;
    using W = V<Number>;
    auto* const out = static_cast<Number*>(args.out);
    const auto* const d_out = static_cast<const T*>(args.d_out);
    const std::int64_t row_bytes = args.width * static_cast<std::int64_t>(sizeof(T));
    const std::int64_t ahead = tokens_ahead(args, row_bytes);
    TokenRows<T> rows;
    LaterRows<T> later;
    for (std::int64_t t = 0; t < args.tokens; ++t) {
      rows.find(args, in, t, nullptr);
      later.find(args, in, t + ahead);
      const T* const of_token = d_out + t * args.width;
      Number* const to = out + t * args.k;
      for (std::int64_t j = 0; j < args.k; ++j) to[j] = Number{0};
      std::int64_t j = 0;
      for (; j + 4 <= rows.count; j += 4) {
        Number products[4];
        row_products<W, 4, true>(of_token, rows.row + j, args.width, products, later.row + j);
        for (std::int64_t i = 0; i < 4; ++i) to[rows.entry[j + i]] = products[i];
      }
      for (; j + 2 <= rows.count; j += 2) {
        Number products[2];
        row_products<W, 2, true>(of_token, rows.row + j, args.width, products, later.row + j);
        for (std::int64_t i = 0; i < 2; ++i) to[rows.entry[j + i]] = products[i];
      }
      for (; j < rows.count; ++j)
        row_products<W, 1, true>(of_token, rows.row + j, args.width, to + rows.entry[j], later.row + j);
    }
  });
}

template <template <class> class V, class T>
void jitter_rows(const JitterArgs& args, const T* src) {
  auto* const dst = static_cast<T*>(args.dst);
  const float twice = 2.0F * args.epsilon;
  const float least = 1.0F - args.epsilon;
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    const auto seed = static_cast<std::uint32_t>(priority_of(args.seed, args.first_token + t, 0));
    for_each_vector<V, float>(0, args.width, [&](auto width, std::int64_t c) {
      using W = typename decltype(width)::Vector;
      const W uniform = W::uniforms(seed, static_cast<std::uint32_t>(c));
      jittered(W::load(src + t * args.width + c), uniform, W::splat(twice), W::splat(least))
          .store(dst + t * args.width + c);
    });
  }
}

template <template <class> class V>
void jitter_any(const JitterArgs& args) {
  if (args.dtype == DType::kBFloat16) return jitter_rows<V>(args, static_cast<const BFloat16*>(args.src));
  if (args.dtype == DType::kFloat16) return jitter_rows<V>(args, static_cast<const Float16*>(args.src));
  jitter_rows<V>(args, static_cast<const float*>(args.src));
}

}  // namespace
}  // namespace zeroth::kernels
