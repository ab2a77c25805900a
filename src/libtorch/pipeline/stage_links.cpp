#include "libtorch/pipeline/stage_links.h"

#include "libtorch/pipeline/running_action.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace zeroth::libtorch {
namespace {

constexpr const char* kWhere = "libtorch.pipeline";
constexpr std::uint32_t kMagic = 0x5a505031;
constexpr std::uint32_t kLongestForm = 1U << 26U;
/// Of every message here: ranks compare it, so that a call of the model's own between stages is told from a parcel.
constexpr MessageTag kTag{.unit = -1, .label = 0x7069};

std::string describe(const Parcel& parcel) {
  if (is_vocabulary(parcel.told_by)) {
    const char* const what = parcel.told_by == ActionKind::kVocabInput ? "the input of the head"
                             : parcel.told_by == ActionKind::kVocabSum ? "the scores of a slice of the head"
                                                                       : "a gradient of the input of the head";
    return what + (", micro-batch " + std::to_string(parcel.micro_batch));
  }
  return std::string(parcel.is_gradient ? "the gradient of the output" : "the input") + " of chunk " +
         std::to_string(parcel.chunk) + ", micro-batch " + std::to_string(parcel.micro_batch);
}

/// Whether ranks of a stage that have the same values send the same: each has other rows of a head.
bool is_alike(const Parcel& parcel) {
  return parcel.told_by != ActionKind::kVocabSum && parcel.told_by != ActionKind::kVocabInputGradient;
}

/// The action by which another stage sends a parcel.
Action sender_of(const Parcel& parcel) {
  if (is_vocabulary(parcel.told_by)) return {.kind = parcel.told_by, .micro_batch = parcel.micro_batch};
  return parcel.is_gradient ? Action{ActionKind::kSendBackward, parcel.chunk + 1, parcel.micro_batch}
                            : Action{ActionKind::kSendForward, parcel.chunk - 1, parcel.micro_batch};
}

/// "the input of chunk 1, micro-batch 3, from stage 0 (0SEND_F3)".
std::string describe_from(const Parcel& parcel, int stage) {
  return describe(parcel) + ", from stage " + std::to_string(stage) + " (" + to_text(sender_of(parcel)) + ")";
}

/// A parcel that is received (`stage`: from) or sent (`stage`: to).
ActionWord word_of_parcel(const Parcel& parcel, int stage, bool sends) {
  if (is_vocabulary(parcel.told_by)) return word_of({.action = sender_of(parcel), .stage = stage});
  const ActionKind kind = parcel.is_gradient ? (sends ? ActionKind::kSendBackward : ActionKind::kRecvBackward)
                                             : (sends ? ActionKind::kSendForward : ActionKind::kRecvForward);
  return word_of({.action = {kind, parcel.chunk, parcel.micro_batch}, .stage = stage});
}

std::string text_of_parcel(ActionWord word) {
  const RunningAction of = running_of(word);
  const Parcel parcel{
      .is_gradient = of.action.kind == ActionKind::kSendBackward || of.action.kind == ActionKind::kRecvBackward,
      .chunk = of.action.chunk,
      .micro_batch = of.action.micro_batch,
      .told_by = is_vocabulary(of.action.kind) ? of.action.kind : ActionKind::kForward};
  return is_send(of.action.kind) ? describe(parcel) + ", to stage " + std::to_string(of.stage)
                                 : describe_from(parcel, of.stage);
}

bool is_ours(const MessageTag& tag) {
  return tag.unit == kTag.unit && tag.label == kTag.label;
}

/// All calls here have one tag; what a wait is for is known at its time only.
TagNames names_of(std::shared_ptr<const std::atomic<ActionWord>> awaited) {
  return {.name = [awaited = std::move(awaited)](const MessageTag& tag) -> std::string {
            if (!is_ours(tag)) return tag.unit >= 0 ? "unit " + std::to_string(tag.unit) : "";
            const ActionWord word = awaited->load(std::memory_order_relaxed);
            return word == 0 ? "values between stages" : text_of_parcel(word);
          },
          .hint = {}};
}

/// While this lives a wait of this rank is for one parcel.
class Awaiting {
 public:
  Awaiting(std::atomic<ActionWord>& place, ActionWord word) : place_(place) { place_.store(word); }
  Awaiting(const Awaiting&) = delete;
  Awaiting& operator=(const Awaiting&) = delete;
  ~Awaiting() { place_.store(0); }

 private:
  std::atomic<ActionWord>& place_;
};

std::string text_of_run(bool trains, int micro_batches) {
  return (trains ? "a training step" : "an evaluation") +
         (" of " + std::to_string(micro_batches) + " micro-batch" + (micro_batches == 1 ? "" : "es"));
}

Collective send_of(std::span<const std::byte> bytes, int to) {
  return Communicator::send_call(
      std::span<const std::uint8_t>(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()), to, kTag);
}

Collective recv_of(std::span<std::byte> bytes, int from) {
  return Communicator::recv_call(std::span<std::uint8_t>(reinterpret_cast<std::uint8_t*>(bytes.data()), bytes.size()),
                                 from, kTag);
}

}  // namespace

struct StageLinks::Head {
  std::uint32_t magic = kMagic;
  std::uint32_t form_bytes = 0;  ///< 0: the form of the last values of this kind
  std::uint64_t digest = 0;      ///< of the program
  std::uint64_t step = 0;
  std::int32_t chunk = 0;
  std::int32_t micro_batch = 0;
  std::uint16_t is_gradient = 0;
  std::uint8_t told_by = 0;
  std::uint8_t evaluates = 0;
  std::int32_t micro_batches = 0;  ///< of the step
};

struct StageLinks::Sending {
  Head head{};
  std::string form{};
  std::vector<at::Tensor> tensors{};
  ActionWord what = 0;
  std::unique_ptr<PendingPoints> calls{};  // the last member: it goes first
};

StageLinks::StageLinks(Communicator stages, std::optional<Communicator> copies, c10::Device device)
    : stages_(std::move(stages)),
      copies_(std::move(copies)),
      device_(device),
      awaited_(std::make_shared<std::atomic<ActionWord>>(0)) {
  static_assert(std::is_trivially_copyable_v<Head> && sizeof(Head) == 40);
  stages_.backend().set_tag_names(names_of(awaited_));
}

StageLinks::~StageLinks() = default;

std::string StageLinks::name_of_stage(int stage) const {
  return "stage " + std::to_string(stage) + " of " + std::to_string(stages_.size()) + " (" +
         stages_.backend().group_name() + ")";
}

bool StageLinks::can_slice(const at::Tensor& tensor) const {
  constexpr std::size_t kLeast = std::size_t{16} << 10U;  // below it a gather costs more than the bytes
  return copies_ && copies_->size() > 1 && tensor.defined() && tensor.nbytes() >= kLeast &&
         tensor.nbytes() % static_cast<std::size_t>(copies_->size()) == 0;
}

std::span<std::byte> StageLinks::slice_of(const at::Tensor& tensor, bool in_slices) const {
  const std::span<std::byte> all(static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes());
  if (!in_slices) return all;
  const std::size_t size = all.size() / static_cast<std::size_t>(copies_->size());
  return all.subspan(size * static_cast<std::size_t>(copies_->rank()), size);
}

void StageLinks::begin_step(std::uint64_t step, std::uint64_t digest, Run run) {
  step_ = step;
  digest_ = digest;
  run_ = run;
}

void StageLinks::send(int to, const Parcel& parcel, SentValues values) {
  forget_sent();
  auto sending = std::make_unique<Sending>();
  sending->head = {.digest = digest_,
                   .step = step_,
                   .chunk = parcel.chunk,
                   .micro_batch = parcel.micro_batch,
                   .is_gradient = static_cast<std::uint16_t>(parcel.is_gradient ? 1 : 0),
                   .told_by = static_cast<std::uint8_t>(parcel.told_by),
                   .evaluates = static_cast<std::uint8_t>(run_.trains ? 0 : 1),
                   .micro_batches = run_.micro_batches};
  sending->what = word_of_parcel(parcel, to, /*sends=*/true);
  values.in_slices.clear();
  values.on_device.clear();
  for (at::Tensor& tensor : values.tensors) {
    values.on_device.push_back(tensor.defined() && !tensor.is_cpu());
    if (tensor.defined()) tensor = tensor.cpu().contiguous();
    values.in_slices.push_back(is_alike(parcel) && can_slice(tensor));
  }
  std::string form = form_of(values);
  std::string& last = sent_forms_[{to, parcel.is_gradient, parcel.chunk, parcel.told_by}];
  if (form != last) {
    last = form;
    sending->head.form_bytes = static_cast<std::uint32_t>(form.size());
    sending->form = std::move(form);
    ++descriptions_;
  }
  sending->tensors = std::move(values.tensors);
  std::vector<Collective> calls{send_of(std::as_bytes(std::span(&sending->head, 1)), to)};
  if (!sending->form.empty()) calls.push_back(send_of(std::as_bytes(std::span(sending->form)), to));
  for (std::size_t index = 0; index < sending->tensors.size(); ++index) {
    const at::Tensor& tensor = sending->tensors[index];
    if (!tensor.defined() || tensor.nbytes() == 0) continue;
    const std::span<const std::byte> bytes = slice_of(tensor, values.in_slices[index]);
    calls.push_back(send_of(bytes, to));
    sent_bytes_ += bytes.size();
  }
  sending->calls = stages_.backend().start(calls, stages_.stream());
  sending_.push_back(std::move(sending));
}

void StageLinks::refuse(const Head& head, int from, const Parcel& wanted) const {
  const auto differ = [&](const std::string& what, const std::string& expected, const std::string& got) {
    return Error(ErrorCode::kMismatch, what,
                 {.where = kWhere,
                  .who = name_of_stage(from),
                  .which = describe_from(wanted, from) + " to stage " + std::to_string(stages_.rank()),
                  .expected = expected,
                  .got = got,
                  .hint = "all stages must run the same schedule, with the same number of micro-batches and steps"});
  };
  if (head.magic != kMagic) throw differ("a message between stages is damaged", "its head", "other bytes");
  if ((head.evaluates == 0) != run_.trains || head.micro_batches != run_.micro_batches)
    throw differ("stages do not run the same", text_of_run(run_.trains, run_.micro_batches),
                 text_of_run(head.evaluates == 0, head.micro_batches));
  if (head.step != step_)
    throw differ("stages are in different steps", "call " + std::to_string(step_) + " of the pipeline",
                 "call " + std::to_string(head.step));
  if (head.digest != digest_) throw differ("stages run different programs", "the program of this stage", "another one");
  throw differ("a message between stages is damaged", "a shorter description",
               std::to_string(head.form_bytes) + " bytes");
}

std::pair<Parcel, SentValues> StageLinks::take_next(int from, const Parcel& wanted) {
  Head head;
  const Collective first = recv_of(std::as_writable_bytes(std::span(&head, 1)), from);
  stages_.batch({&first, 1});
  const bool is_of_step = head.magic == kMagic && head.step == step_ && head.digest == digest_ &&
                          (head.evaluates == 0) == run_.trains && head.micro_batches == run_.micro_batches &&
                          head.form_bytes <= kLongestForm;
  if (!is_of_step) refuse(head, from, wanted);
  const Parcel parcel{.is_gradient = head.is_gradient != 0,
                      .chunk = head.chunk,
                      .micro_batch = head.micro_batch,
                      .told_by = static_cast<ActionKind>(head.told_by)};
  std::string& form = received_forms_[{from, parcel.is_gradient, parcel.chunk, parcel.told_by}];
  if (head.form_bytes > 0) {
    form.assign(head.form_bytes, '\0');
    const Collective call = recv_of(std::as_writable_bytes(std::span(form)), from);
    stages_.batch({&call, 1});
  }
  SentValues values = read_form(form, name_of_stage(from));
  std::vector<Collective> calls;
  for (std::size_t index = 0; index < values.tensors.size(); ++index) {
    const at::Tensor& tensor = values.tensors[index];
    if (!tensor.defined() || tensor.nbytes() == 0) continue;
    ZR_CHECK(!values.in_slices[index] || can_slice(tensor), ErrorCode::kMismatch, "stages do not send slices alike",
             {.where = kWhere,
              .who = name_of_stage(from),
              .which = describe_from(parcel, from),
              .expected = copies_ ? std::to_string(copies_->size()) + " ranks with the same values" : "whole tensors",
              .got = "slices"});
    const std::span<std::byte> bytes = slice_of(tensor, values.in_slices[index]);
    calls.push_back(recv_of(bytes, from));
    received_bytes_ += bytes.size();
  }
  if (!calls.empty()) stages_.batch(calls);
  for (std::size_t index = 0; index < values.tensors.size(); ++index) {
    if (!values.in_slices[index]) continue;
    const at::Tensor& tensor = values.tensors[index];
    const std::span<std::byte> own = slice_of(tensor, true);
    copies_->all_gather(std::span(reinterpret_cast<const std::uint8_t*>(own.data()), own.size()),
                        std::span(static_cast<std::uint8_t*>(tensor.mutable_data_ptr()), tensor.nbytes()), kTag);
  }
  for (std::size_t index = 0; index < values.tensors.size(); ++index) {
    if (values.on_device[index]) values.tensors[index] = values.tensors[index].to(device_);
  }
  return {parcel, std::move(values)};
}

SentValues StageLinks::receive(int from, const Parcel& parcel) {
  forget_sent();
  const Awaiting awaiting(*awaited_, word_of_parcel(parcel, from, /*sends=*/false));
  while (true) {
    if (auto found = arrived_.extract({from, parcel}); !found.empty()) return std::move(found.mapped());
    auto [next, values] = take_next(from, parcel);
    if (next == parcel) return std::move(values);
    const bool fresh = arrived_.try_emplace({from, next}, std::move(values)).second;
    ZR_CHECK(fresh, ErrorCode::kMismatch, "a stage sent the same values twice",
             {.where = kWhere, .who = name_of_stage(from), .which = describe(next)});
  }
}

void StageLinks::forget_sent() {
  std::erase_if(sending_, [](const std::unique_ptr<Sending>& one) { return one->calls->done(); });
}

void StageLinks::settle() {
  for (const std::unique_ptr<Sending>& one : sending_) {
    const Awaiting awaiting(*awaited_, one->what);
    one->calls->wait();
  }
  sending_.clear();
}

void StageLinks::abandon() noexcept {
  sending_.clear();
  arrived_.clear();
}

}  // namespace zeroth::libtorch
