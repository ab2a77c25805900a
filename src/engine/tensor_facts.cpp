#include "engine/tensor_facts.h"

#include "engine/texts.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <algorithm>
#include <utility>

namespace zeroth {
TensorFacts::TensorFacts(Communicator job, std::span<const std::string> own, bool is_split) : job_(std::move(job)) {
  constexpr char kEnd = '\n';  // of a name; none has it
  std::string text(is_split ? "split" : "");
  for (const std::string& name : own) (text += kEnd) += name;
  for (const std::string& of_rank : gather_texts(text, job_)) {
    std::size_t end = of_rank.find(kEnd);
    is_split_ = is_split_ || of_rank.substr(0, end) == "split";
    while (end != std::string::npos) {
      const std::size_t begin = end + 1;
      end = of_rank.find(kEnd, begin);
      names_.push_back(of_rank.substr(begin, end == std::string::npos ? end : end - begin));
    }
  }
  std::ranges::sort(names_);
  names_.erase(std::unique(names_.begin(), names_.end()), names_.end());
}

int TensorFacts::number(const std::string& name) const {
  const auto found = std::ranges::lower_bound(names_, name);
  ZR_ASSERT(found != names_.end() && *found == name, "a tensor of this rank");
  return static_cast<int>(found - names_.begin());
}

void TensorFacts::begin(std::vector<TensorFact> facts) {
  facts_ = std::move(facts);
  const std::size_t count = names_.size() * facts_.size();
  sums_.assign(std::ranges::count(facts_, TensorFact::kNorm) > 0 ? count : 0, {});
  greatest_.assign(std::ranges::count(facts_, TensorFact::kGreatest) > 0 ? count : 0, 0.0);
}

void TensorFacts::add(int tensor, std::size_t fact, std::span<const double> blocks) {
  if (facts_[fact] == TensorFact::kNorm) {
    kernels::NormAccumulator sum;
    sum.add_blocks(blocks);
    const std::lock_guard lock(adding_);
    return sums_[at(tensor, fact)].merge(sum);
  }
  const std::lock_guard lock(adding_);
  double& most = greatest_[at(tensor, fact)];
  for (const double block : blocks) most = std::max(most, block);
}

void TensorFacts::combine() {
  if (!is_split_) return;
  if (!sums_.empty()) {
    std::vector<std::int64_t> words;
    words.reserve(sums_.size() * kernels::NormAccumulator::kWords);
    for (const kernels::NormAccumulator& sum : sums_) words.insert(words.end(), sum.words().begin(), sum.words().end());
    job_.all_reduce(std::span(words));
    auto from = words.begin();
    for (kernels::NormAccumulator& sum : sums_) {
      std::copy_n(from, sum.words().size(), sum.words().begin());
      from += kernels::NormAccumulator::kWords;
    }
  }
  if (!greatest_.empty()) job_.all_reduce(std::span(greatest_), ReduceOp::kMax);
}

std::vector<double> TensorFacts::of(int tensor) const {
  std::vector<double> values;
  for (std::size_t fact = 0; fact < facts_.size(); ++fact) {
    const std::size_t index = at(tensor, fact);
    values.push_back(facts_[fact] == TensorFact::kNorm ? sums_[index].l2_norm() : greatest_[index]);
  }
  return values;
}

}  // namespace zeroth
