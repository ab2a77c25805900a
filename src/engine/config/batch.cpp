// The arithmetic of batch sizes: train = micro x accumulate x data ranks.
#include <zeroth/engine/config.h>

#include <string>

namespace zeroth {
namespace {

// Sizes are below 2^31 each, so that a product of two fits 64 bits and one of three need not.
std::int64_t checked_product(std::int64_t a, std::int64_t b, std::int64_t c) {
  std::int64_t product = 0;
  ZR_CHECK(
      !__builtin_mul_overflow(a, b, &product) && !__builtin_mul_overflow(product, c, &product), ErrorCode::kConfig,
      "the batch does not fit 64 bits",
      {.where = "engine.config", .got = std::to_string(a) + " x " + std::to_string(b) + " x " + std::to_string(c)});
  return product;
}

// "6 or 9": the multiples of `factor` below and above `value`; below 1 there is none.
std::string nearest_multiples(std::int64_t value, std::int64_t factor) {
  const std::int64_t below = value / factor * factor;
  if (below == 0) return std::to_string(factor);
  return std::to_string(below) + " or " + std::to_string(below + factor);
}

[[noreturn]] void refuse(std::string message, std::string expected, std::string got, std::string hint) {
  throw Error(ErrorCode::kConfig, std::move(message),
              {.where = "engine.config",
               .which = "train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps",
               .expected = std::move(expected),
               .got = std::move(got),
               .hint = std::move(hint)});
}

}  // namespace

void Config::require_data_ranks(std::int64_t data_ranks) const {
  ZR_CHECK(data_ranks >= 1, ErrorCode::kUsage, "a world has at least one data rank",
           {.where = "engine.config", .got = std::to_string(data_ranks)});
  ZR_CHECK(!data_parallel_size || *data_parallel_size == data_ranks, ErrorCode::kConfig,
           "the configuration was written for another number of data ranks",
           {.where = "engine.config",
            .which = "/data_parallel_size",
            .expected = std::to_string(data_parallel_size.value_or(0)) + " data ranks",
            .got = std::to_string(data_ranks),
            .hint = "start that many ranks, or leave the key out"});
}

BatchSizes Config::resolve(std::int64_t data_ranks) const {
  require_data_ranks(data_ranks);
  const std::string ranks = std::to_string(data_ranks) + (data_ranks == 1 ? " data rank" : " data ranks");
  const auto& train = train_batch_size;
  const auto& micro = train_micro_batch_size_per_gpu;
  const auto& accumulate = gradient_accumulation_steps;
  for (const auto* size : {&train, &micro, &accumulate}) {
    if (*size && **size < 1) refuse("a batch size is below 1", "at least 1", std::to_string(**size), {});
  }

  if (!train && !micro) {
    refuse("no batch size is given", "train_micro_batch_size_per_gpu or train_batch_size",
           accumulate ? "gradient_accumulation_steps alone" : "neither", "set train_micro_batch_size_per_gpu");
  }
  if (!train) {
    const std::int64_t steps = accumulate.value_or(1);
    return {checked_product(*micro, steps, data_ranks), *micro, steps};
  }
  // The part of the train batch that is given besides the ranks; what remains must come out whole.
  const std::int64_t given = checked_product(micro.value_or(1), accumulate.value_or(1), 1);
  const std::int64_t factor = checked_product(given, data_ranks, 1);
  std::string terms = ranks;
  if (accumulate) terms = std::to_string(*accumulate) + " micro-steps x " + terms;
  if (micro) terms = "micro batch " + std::to_string(*micro) + " x " + terms;
  if (micro && accumulate) {
    if (*train != factor) {
      std::string hint = "train_batch_size " + std::to_string(factor);
      const std::int64_t once = checked_product(*micro, data_ranks, 1);
      if (*train % once == 0) hint += ", or gradient_accumulation_steps " + std::to_string(*train / once);
      const std::int64_t per_micro = checked_product(*accumulate, data_ranks, 1);
      if (*train % per_micro == 0) {
        hint += ", or train_micro_batch_size_per_gpu " + std::to_string(*train / per_micro);
      }
      refuse("the batch sizes contradict each other", terms + " = " + std::to_string(factor),
             "train_batch_size " + std::to_string(*train), hint + "; or leave one of the three out");
    }
    return {*train, *micro, *accumulate};
  }
  if (*train % factor != 0) {
    refuse("train_batch_size " + std::to_string(*train) + " does not divide among the ranks",
           "a multiple of " + terms + (micro || accumulate ? " = " + std::to_string(factor) : ""),
           "train_batch_size " + std::to_string(*train),
           "the nearest sizes that work are " + nearest_multiples(*train, factor));
  }
  if (micro) return {*train, *micro, *train / factor};
  return {*train, *train / factor, accumulate.value_or(1)};
}

}  // namespace zeroth
