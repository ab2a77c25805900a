#include "engine/accumulation.h"

#include "checkpoint/element_reader.h"
#include "engine/states_read.h"
#include "engine/texts.h"
#include "engine/uneven_join.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/safetensors.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <exception>
#include <set>
#include <span>
#include <utility>

namespace zeroth {
namespace {

using Json = nlohmann::ordered_json;

std::vector<int> gradient_degrees_of(const ShardGroups& groups) {
  std::vector<int> degrees;
  for (const auto& group : groups) degrees.push_back(group->memory().degrees().gradient);
  return degrees;
}

}  // namespace

std::string text_of(const Accumulation& accumulation) {
  if (accumulation.micro_step == 0) return "";
  return Json{{"micro_step", accumulation.micro_step},
              {"micro_steps", accumulation.micro_steps},
              {"policy", accumulation.policy},
              {"gradient_degrees", accumulation.gradient_degrees},
              {"has_grad", accumulation.has_grad}}
      .dump();
}

Accumulation accumulation_of(const std::string& text, const std::string& where) {
  if (text.empty()) return {};
  try {
    const Json json = Json::parse(text);
    Accumulation result{.micro_step = json.at("micro_step").get<int>(),
                        .micro_steps = json.at("micro_steps").get<int>(),
                        .policy = json.at("policy").get<std::string>(),
                        .gradient_degrees = json.at("gradient_degrees").get<std::vector<int>>(),
                        .has_grad = json.at("has_grad").get<std::vector<std::string>>()};
    ZR_CHECK(result.micro_step >= 1 && result.micro_step < result.micro_steps, ErrorCode::kCheckpoint,
             "a checkpoint is between micro-steps that cannot be", {.where = "engine.load", .which = where});
    return result;
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::kCheckpoint, "the accumulation of a checkpoint cannot be read",
                {.where = "engine.load", .which = where, .got = error.what()});
  }
}

std::string step_sum_name(ShardGroup& group) {
  const int degree = group.memory().degrees().gradient;
  std::string name(kStepSum);
  if (degree < group.size()) name += "@" + std::to_string(group.rank() / degree);
  return name;
}

std::vector<StatePiece> step_pieces(ShardGroup& group, int job_rank) {
  std::vector<StatePiece> pieces;
  const ModelLayout& model = group.layout();
  for (int index = 0; index < static_cast<int>(model.flats.size()); ++index) {
    const FlatLayout& flat = model.flat(index);
    if (!flat.trainable) continue;
    std::byte* const sums = group.gradients().sums_so_far(index);
    const Range summed = group.memory().micro_step_part(index);
    for (const Segment& segment : flat.segments) {
      if (segment.numel == 0) continue;
      const BoxRange box = whole_box(model.params[static_cast<std::size_t>(segment.param)]);
      const Range part = intersect(segment.range(), summed);
      if (sums != nullptr && part.size() > 0) {
        StatePiece piece{
            .param = segment.param, .state = step_sum_name(group), .dtype = flat.accumulation(), .has = box};
        piece.has.begin = part.begin - segment.offset;
        piece.has.end = part.end - segment.offset;
        if (group.writes_states()) piece.writes = {piece.has.begin, piece.has.end};
        piece.data = StateBytes(sums + array_bytes(part.begin - summed.begin, piece.dtype));
        pieces.push_back(std::move(piece));
      }
      const GradientStore::Waiting waiting = group.gradients().waiting(segment.param);
      if (waiting.data == nullptr) continue;
      StatePiece piece{.param = segment.param,
                       .state = std::string(kStepGradient) + "@" + std::to_string(job_rank),
                       .dtype = waiting.dtype,
                       .has = box};
      piece.has.begin = 0;
      piece.has.end = segment.numel;
      piece.writes = {0, segment.numel};
      piece.data = StateBytes(const_cast<std::byte*>(waiting.data));
      pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

void Engine::settle_accumulation() {
  enum : std::size_t { kMicroStep, kJoined, kWords };
  const std::array<std::int64_t, kWords> own{micro_step_, uneven_join_->joined() + uneven_join_->num_out()};
  std::vector<std::int64_t> all(static_cast<std::size_t>(world()) * kWords);
  communicator_.all_gather(std::span<const std::int64_t>(own), std::span(all));
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(world()); ++rank) {
    ZR_CHECK(all[rank * kWords + kMicroStep] == all[kMicroStep], ErrorCode::kMismatch,
             "ranks save in different micro-steps",
             {.where = "engine.save",
              .who = "rank " + std::to_string(rank),
              .expected = std::to_string(all[kMicroStep]) + " (rank 0)",
              .got = std::to_string(all[rank * kWords + kMicroStep])});
    ZR_CHECK(micro_step_ == 0 || all[rank * kWords + kJoined] == 0, ErrorCode::kUsage,
             "a save in the middle of a step in which ranks have no batch",
             {.where = "engine.save", .who = "rank " + std::to_string(rank), .hint = "save after the step"});
  }
  if (micro_step_ == 0) return;
  for (const auto& group : groups_) {
    const std::array<std::int64_t, 1> closed{static_cast<std::int64_t>(group->gradients().backwards())};
    std::vector<std::int64_t> of_group(static_cast<std::size_t>(group->size()));
    group->communicator().all_gather(std::span<const std::int64_t>(closed), std::span(of_group));
    group->gradients().complete_backwards(static_cast<std::uint64_t>(*std::ranges::max_element(of_group)));
  }
}

std::string Engine::describe_accumulation() {
  if (micro_step_ == 0) return "";
  std::vector<std::string> own;
  for (const auto& group : groups_) {
    const std::vector<bool> has_grad = group->has_grad();
    for (std::size_t index = 0; index < has_grad.size(); ++index) {
      if (has_grad[index])
        own.push_back(layout_.params[static_cast<std::size_t>(group->part().params[index])].tensor_name());
    }
  }
  std::set<std::string> any;
  for (const std::string& text : gather_texts(Json(own).dump(), communicator_)) {
    for (const Json& name : Json::parse(text)) any.insert(name.get<std::string>());
  }
  return text_of(Accumulation{.micro_step = micro_step_,
                              .micro_steps = settings_.micro_steps,
                              .policy = std::string(name_of(settings_.plan.policy)),
                              .gradient_degrees = gradient_degrees_of(groups_),
                              .has_grad = {any.begin(), any.end()}});
}

void Engine::read_accumulation(StatesRead& read, LoadReport& report, const LoadOptions& options,
                               StateSources& sources) {
  const Accumulation there = accumulation_of(report.manifest.accumulation, report.path);
  if (there.micro_step == 0) return;
  const Accumulation here{.micro_steps = settings_.micro_steps,
                          .policy = std::string(name_of(settings_.plan.policy)),
                          .gradient_degrees = gradient_degrees_of(groups_)};
  if (report.manifest.world != world() || !there.fits(here)) {
    ZR_CHECK(!options.strict, ErrorCode::kCheckpoint,
             "a checkpoint from the middle of a step goes on with other ranks or another accumulation",
             {.where = "engine.load",
              .which = report.path,
              .expected = std::to_string(report.manifest.world) + " ranks, " + std::to_string(there.micro_steps) +
                          " micro-steps, " + there.policy,
              .got = std::to_string(world()) + " ranks, " + std::to_string(here.micro_steps) + " micro-steps, " +
                     here.policy,
              .hint = "strict = false forgets the " + std::to_string(there.micro_step) +
                      " micro-steps of that step; or take a checkpoint from between steps"});
    report.missing.push_back("gradients of " + std::to_string(there.micro_step) + " micro-steps");
    return;
  }
  read.micro_step = there.micro_step;
  std::set<std::string> has_grad;
  for (const std::string& name : there.has_grad) has_grad.insert(unwrapped_name(name));
  for (const ParamSpec& spec : layout_.params)
    read.has_grad.push_back(has_grad.contains(options.name_there(spec.tensor_name())));
  for (std::size_t number = 0; number < groups_.size(); ++number) {
    ShardGroup& group = *groups_[number];
    const std::string sum_name = step_sum_name(group);
    const ModelLayout& model = group.layout();
    for (int index = 0; index < static_cast<int>(model.flats.size()); ++index) {
      const FlatLayout& flat = model.flat(index);
      if (!flat.trainable) continue;
      const Range summed = group.memory().micro_step_part(index);
      StatesRead::Sums sums{.group = number, .flat = index, .values = {}};
      bool any = false;
      for (const Segment& segment : flat.segments) {
        const ParamSpec& spec = model.params[static_cast<std::size_t>(segment.param)];
        const std::string key = options.name_there(spec.tensor_name()) + "/";
        if (segment.numel == 0) continue;
        const auto read_into = [&](const std::vector<detail::Source>& from, const Range& part,
                                   std::span<std::byte> into) {
          BoxRange has = whole_box(spec);
          has.begin = part.begin;
          has.end = part.end;
          const detail::RankEntry& first = from.front().entry;
          ZR_CHECK(first.range.tensor_shape() == has.tensor_shape() &&
                       first.dtype == safetensors_dtype(flat.accumulation()) &&
                       detail::read_elements(has, size_of(flat.accumulation()), from, sources.files, into),
                   ErrorCode::kCheckpoint, "a checkpoint lacks elements of a step's gradients",
                   {.where = "engine.load", .which = report.path + ", " + key});
        };
        if (const auto found = sources.by_key.find(key + sum_name); found != sources.by_key.end()) {
          any = true;
          const Range part = intersect(segment.range(), summed);
          if (sums.values.empty()) sums.values.resize(array_bytes(summed.size(), flat.accumulation()));
          if (part.size() > 0) {
            read_into(found->second, {part.begin - segment.offset, part.end - segment.offset},
                      std::span(sums.values)
                          .subspan(array_bytes(part.begin - summed.begin, flat.accumulation()),
                                   array_bytes(part.size(), flat.accumulation())));
          }
        }
        const std::string own = key + std::string(kStepGradient) + "@" + std::to_string(rank());
        if (const auto found = sources.by_key.find(own); found != sources.by_key.end()) {
          StatesRead::Gradient gradient{.group = number, .param = segment.param, .values = {}};
          gradient.values.resize(array_bytes(segment.numel, flat.accumulation()));
          read_into(found->second, {0, segment.numel}, gradient.values);
          read.gradients.push_back(std::move(gradient));
        }
      }
      if (any) read.sums.push_back(std::move(sums));
    }
  }
}

void Engine::take_accumulation(const StatesRead& read) {
  if (read.micro_step == 0) return;
  micro_step_ = read.micro_step;
  for (std::size_t number = 0; number < groups_.size(); ++number) {
    ShardGroup& group = *groups_[number];
    GradientStore& gradients = group.gradients();
    gradients.set_micro_step(micro_step_);
    std::vector<int> flats;
    for (const StatesRead::Sums& sums : read.sums) {
      if (sums.group != number) continue;
      kernels_->copy(gradients.restore_sums(sums.flat), sums.values.data(), sums.values.size(),
                     resources_->reduce_stream);
      flats.push_back(sums.flat);
    }
    std::vector<bool> has_grad;
    for (const int param : group.part().params) has_grad.push_back(read.has_grad[static_cast<std::size_t>(param)]);
    gradients.restored(has_grad, flats);
    for (const StatesRead::Gradient& gradient : read.gradients) {
      if (gradient.group != number) continue;
      const ParamSpec& spec = group.layout().params[static_cast<std::size_t>(gradient.param)];
      gradients.add(gradient.param, {gradient.values.data(), spec.shape, accumulation_dtype(spec.dtype)});
    }
  }
}

}  // namespace zeroth
