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

template <template <class> class V>
void permute_any(const PermuteArgs& args) {
  if (args.weights == nullptr) return permute_bytes<V>(args);
  with_row_type(args.dtype, args.in, [&](const auto* in) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(in)>>;
    using Number = RowNumber<T>;
    auto* const out = static_cast<T*>(args.out);
    const auto* const weights = static_cast<const Number*>(args.weights);
    for (std::int64_t slot = 0; slot < args.slots; ++slot) {
      const std::int32_t source = args.source_of[slot];
      const T* const from = in + source / args.k * args.width;
      for_each_vector<V, Number>(0, args.width, [&](auto width, std::int64_t c) {
        using W = typename decltype(width)::Vector;
        weighted(W::load(from + c), W::splat(weights[source])).store(out + slot * args.width + c);
      });
    }
  });
}

template <template <class> class V>
void unpermute_any(const UnpermuteArgs& args) {
  with_row_type(args.dtype, args.in, [&](const auto* in) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(in)>>;
    using Number = RowNumber<T>;
    auto* const out = static_cast<T*>(args.out);
    const auto* const weights = static_cast<const Number*>(args.weights);
    for (std::int64_t t = 0; t < args.tokens; ++t) {
      const std::int32_t* const slots = args.slot_of + t * args.k;
      const Number* const of_token = weights == nullptr ? nullptr : weights + t * args.k;
      for_each_vector<V, Number>(0, args.width, [&](auto width, std::int64_t c) {
        using W = typename decltype(width)::Vector;
        combined<W>(in, args.width, c, slots, of_token, args.k).store(out + t * args.width + c);
      });
    }
  });
}

template <template <class> class V>
void unpermute_weights_any(const UnpermuteArgs& args) {
  with_row_type(args.dtype, args.in, [&](const auto* in) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(in)>>;
    using Number = RowNumber<T>;
    auto* const out = static_cast<Number*>(args.out);
    const auto* const d_out = static_cast<const T*>(args.d_out);
    for (std::int64_t t = 0; t < args.tokens; ++t) {
      for (std::int64_t j = 0; j < args.k; ++j) {
        const std::int32_t slot = args.slot_of[t * args.k + j];
        out[t * args.k + j] =
            slot < 0 ? Number{0} : row_product<V<Number>>(d_out + t * args.width, in + slot * args.width, args.width);
      }
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
