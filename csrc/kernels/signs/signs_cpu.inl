// Memory access of signs.h; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/signs/signs_math.h>
#include <kernels/signs/signs_variants.h>

namespace zeroth::kernels {
namespace {

template <template <class> class V, bool kMomentum, class Types>
void message_range(const SignMessageArgs& args) {
  using T = typename Types::Sum;
  auto* const error = static_cast<T*>(args.error);
  const auto* const momentum = static_cast<const T*>(args.momentum);
  const auto* const grad = static_cast<const typename Types::In*>(args.grad);
  const auto momentum_factor = static_cast<T>(args.momentum_factor);
  const auto grad_factor = static_cast<T>(args.grad_factor);
  for_each_vector<V, T>(0, args.n, [&](auto width, std::int64_t i) {
    using W = typename decltype(width)::Vector;
    W before = W::splat(T(0));
    if constexpr (kMomentum) before = W::load(momentum + i);
    message_of<kMomentum>(W::load(error + i), before, W::load(grad + i), W::splat(momentum_factor),
                          W::splat(grad_factor))
        .store(error + i);
  });
}

template <template <class> class V>
void sign_message_any(const SignMessageArgs& args) {
  with_sign_types(args.grad_dtype, [&](auto types) {
    with_flag(args.momentum != nullptr,
              [&](auto momentum) { message_range<V, decltype(momentum)::kValue, decltype(types)>(args); });
  });
}

/// Calls body(Width<W>{}, i, k) for the vectors of the elements whose signs are the bits of one word, from element
/// `first` on: k is the first bit of the vector in the word.
template <class W, std::int64_t kBits, class Body>
ZR_INLINE void for_each_of_word(std::int64_t first, const Body& body) {
  for (std::int64_t k = 0; k < kBits; k += W::kLanes) {
    body(Width<W>{}, first + k, static_cast<unsigned>(k));
  }
}

/// As many bits as a wide vector has lanes, and at least a byte of them.
template <class W>
constexpr std::int64_t kWordBits = W::kLanes > kSignGroup ? W::kLanes : kSignGroup;

/// Signs of the vectors of one word: pack(Width<W>{}, i) gives those from element i on.
template <class W, std::int64_t kBits, class Pack>
ZR_INLINE unsigned packed_word(std::int64_t first, const Pack& pack) {
  unsigned word = 0;
  for_each_of_word<W, kBits>(first, [&](auto width, std::int64_t i, unsigned k) { word |= pack(width, i) << k; });
  return word;
}

template <template <class> class V, class T>
void pack_range(const SignPackArgs& args) {
  auto* const error = static_cast<T*>(args.error);
  const auto scale = static_cast<T>(args.scale);
  const auto pack = [&](auto width, std::int64_t i) {
    using W = typename decltype(width)::Vector;
    const W message = W::load(error + i);
    const unsigned positive = positive_in(message);
    left_of(message, positive, W::splat(scale)).store(error + i);
    return positive;
  };
  constexpr std::int64_t kBits = kWordBits<V<T>>;
  std::int64_t i = 0;
  for (; i + kBits <= args.n; i += kBits) {
    const unsigned word = packed_word<V<T>, kBits>(i, pack);
    __builtin_memcpy(args.bits + i / kSignGroup, &word, kBits / kSignGroup);
  }
  for (; i < args.n; i += kSignGroup) {
    unsigned word = 0;
    for (std::int64_t k = 0; k < kSignGroup && i + k < args.n; ++k) word |= pack(Width<Lane<T>>{}, i + k) << k;
    args.bits[i / kSignGroup] = static_cast<std::uint8_t>(word);
  }
}

template <template <class> class V>
void sign_pack_any(const SignPackArgs& args) {
  args.dtype == DType::kFloat64 ? pack_range<V, double>(args) : pack_range<V, float>(args);
}

/// True for vectors that have turned(), which takes scales with the opposite sign.
template <class W>
constexpr bool kTurns = W::kLanes > 1 && sizeof(typename W::Value) == sizeof(float);
/// Sources whose scales are held as vectors.
constexpr int kHeldScales = 16;

/// The sum of element i alone.
template <class T>
ZR_INLINE Lane<T> sum_of_element(const SignSumArgs& args, std::int64_t i) {
  const auto value_of = [&](int source) {
    const unsigned word = args.sources[source].bits[i / kSignGroup];
    return Lane<T>::signed_by(word >> static_cast<unsigned>(i % kSignGroup),
                              Lane<T>::splat(static_cast<T>(args.sources[source].scale)));
  };
  Lane<T> sum = value_of(0);
  for (int source = 1; source < args.num_sources; ++source) sum = sum + value_of(source);
  return sum;
}

template <template <class> class V, bool kError, bool kStream, class T>
void sum_range(const SignSumArgs& args, std::int64_t head) {
  using Vector = V<T>;
  auto* const dst = static_cast<T*>(args.dst);
  const auto* const error = static_cast<const T*>(args.error);
  const auto factor = static_cast<T>(args.factor);
  // The vectors of one turn, summed side by side: four wide ones, or the lanes of a byte.
  constexpr std::int64_t kVectors = Vector::kLanes > 1 ? 4 : kSignGroup;
  constexpr std::int64_t kBits = kVectors * Vector::kLanes;
  const auto finished = [&](auto sum, std::int64_t i) {
    using W = decltype(sum);
    W value = sum * W::splat(factor);
    if constexpr (kError) value = value + W::load(error + i);
    return canonical(value);
  };
  const auto scale_of = [&](int source) {
    const auto scale = static_cast<T>(args.sources[source].scale);
    return Vector::splat(kTurns<Vector> ? -scale : scale);
  };
  Vector held[kHeldScales];
  const int num_held = args.num_sources < kHeldScales ? args.num_sources : kHeldScales;
  for (int source = 0; source < num_held; ++source) held[source] = scale_of(source);
  std::int64_t i = 0;
  for (; i < head; ++i) finished(sum_of_element<T>(args, i), i).store(dst + i);
  for (; i + kBits <= args.n; i += kBits) {
    Vector sum[kVectors]{};
    // each(k, q) for the vectors of one source.
    const auto for_source = [&](int source, const Vector& scale, const auto& each) {
      const std::uint8_t* const bits = args.sources[source].bits + i / kSignGroup;
      if constexpr (kTurns<Vector>) {
        for (std::int64_t k = 0; k < kVectors; ++k) {
          const std::int64_t first = k * Vector::kLanes;
          each(k, Vector::turned(Vector::word_of(bits + first / 32 * 4), static_cast<int>(first % 32), scale));
        }
      } else {
        unsigned word = 0;
        __builtin_memcpy(&word, bits, kBits / kSignGroup);
        for (std::int64_t k = 0; k < kVectors; ++k)
          each(k, Vector::signed_by(word >> static_cast<unsigned>(k * Vector::kLanes), scale));
      }
    };
    for_source(0, held[0], [&](std::int64_t k, Vector value) { sum[k] = value; });
    const auto add = [&](std::int64_t k, Vector value) { sum[k] = sum[k] + value; };
    for (int source = 1; source < num_held; ++source) for_source(source, held[source], add);
    for (int source = num_held; source < args.num_sources; ++source) for_source(source, scale_of(source), add);
    for (std::int64_t k = 0; k < kVectors; ++k) {
      const std::int64_t at = i + k * Vector::kLanes;
      write<kStream>(finished(sum[k], at), dst + at);
    }
  }
  for (; i < args.n; ++i) finished(sum_of_element<T>(args, i), i).store(dst + i);
  if constexpr (kStream) stream_fence();
}

/// Streams to a dst of its own that reaches the border of a line after whole bytes of signs.
template <template <class> class V, bool kError, class T>
void sum_to_memory(const SignSumArgs& args) {
  const auto* const dst = static_cast<const T*>(args.dst);
  const std::int64_t head = elements_until_aligned(dst, args.n);
  const bool streams =
      V<T>::kLanes > 1 && args.dst != args.error && wants_streaming(dst, args.n) && head % kSignGroup == 0;
  with_flag(streams, [&](auto flag) {
    constexpr bool kStream = decltype(flag)::kValue;
    sum_range<V, kError, kStream, T>(args, kStream ? head : 0);
  });
}

template <template <class> class V>
void sign_sum_any(const SignSumArgs& args) {
  with_flag(args.error != nullptr, [&](auto error) {
    constexpr bool kError = decltype(error)::kValue;
    args.dtype == DType::kFloat64 ? sum_to_memory<V, kError, double>(args) : sum_to_memory<V, kError, float>(args);
  });
}

}  // namespace
}  // namespace zeroth::kernels
