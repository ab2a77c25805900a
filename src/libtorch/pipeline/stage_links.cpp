#include "libtorch/pipeline/stage_links.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace zeroth::libtorch {
namespace {

constexpr std::uint32_t kMagic = 0x5a505031;
constexpr std::uint32_t kLongestForm = 1U << 26U;
/// Of every message here: ranks compare it, so that a call of the model's own between stages is told from a parcel.
constexpr MessageTag kTag{.unit = -1, .label = 0x7069};

std::string describe(const Parcel& parcel) {
  return std::string(parcel.is_gradient ? "the gradient of the output" : "the input") + " of chunk " +
         std::to_string(parcel.chunk) + ", micro-batch " + std::to_string(parcel.micro_batch);
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
  std::uint32_t is_gradient = 0;
  std::uint32_t unused = 0;
};

struct StageLinks::Sending {
  Head head{};
  std::string form{};
  std::vector<at::Tensor> tensors{};
  std::unique_ptr<PendingPoints> calls{};  // the last member: it goes first
};

StageLinks::StageLinks(Communicator stages, std::optional<Communicator> copies)
    : stages_(std::move(stages)), copies_(std::move(copies)) {
  static_assert(std::is_trivially_copyable_v<Head> && sizeof(Head) == 40);
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

void StageLinks::begin_step(std::uint64_t step, std::uint64_t digest) {
  step_ = step;
  digest_ = digest;
}

void StageLinks::send(int to, const Parcel& parcel, SentValues values) {
  forget_sent();
  auto sending = std::make_unique<Sending>();
  sending->head = {.digest = digest_,
                   .step = step_,
                   .chunk = parcel.chunk,
                   .micro_batch = parcel.micro_batch,
                   .is_gradient = parcel.is_gradient ? 1U : 0U};
  values.in_slices.clear();
  for (at::Tensor& tensor : values.tensors) {
    if (tensor.defined()) tensor = tensor.contiguous();
    values.in_slices.push_back(can_slice(tensor));
  }
  std::string form = form_of(values);
  std::string& last = sent_forms_[{to, parcel.is_gradient, parcel.chunk}];
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

std::pair<Parcel, SentValues> StageLinks::take_next(int from) {
  Head head;
  const Collective first = recv_of(std::as_writable_bytes(std::span(&head, 1)), from);
  stages_.batch({&first, 1});
  const auto require = [&](bool holds, const std::string& what, const std::string& expected, const std::string& got) {
    ZR_CHECK(holds, ErrorCode::kMismatch, what,
             {.where = "libtorch.pipeline",
              .who = name_of_stage(from),
              .which = "a message to " + name_of_stage(stages_.rank()),
              .expected = expected,
              .got = got,
              .hint = "all stages must run the same schedule, with the same number of micro-batches and steps"});
  };
  require(head.magic == kMagic, "a message between stages is damaged", "its head", "other bytes");
  require(head.step == step_, "stages are in different steps", "step " + std::to_string(step_),
          "step " + std::to_string(head.step));
  require(head.digest == digest_, "stages run different programs", "the program of this stage", "another one");
  require(head.form_bytes <= kLongestForm, "a message between stages is damaged", "a shorter description",
          std::to_string(head.form_bytes) + " bytes");
  const Parcel parcel{.is_gradient = head.is_gradient != 0, .chunk = head.chunk, .micro_batch = head.micro_batch};
  std::string& form = received_forms_[{from, parcel.is_gradient, parcel.chunk}];
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
    require(!values.in_slices[index] || can_slice(tensor), "stages do not send slices alike",
            copies_ ? std::to_string(copies_->size()) + " ranks with the same values" : "whole tensors", "slices");
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
  return {parcel, std::move(values)};
}

SentValues StageLinks::receive(int from, const Parcel& parcel) {
  forget_sent();
  while (true) {
    if (auto found = arrived_.extract({from, parcel}); !found.empty()) return std::move(found.mapped());
    auto [next, values] = take_next(from);
    if (next == parcel) return std::move(values);
    const bool fresh = arrived_.try_emplace({from, next}, std::move(values)).second;
    ZR_CHECK(fresh, ErrorCode::kMismatch, "a stage sent the same values twice",
             {.where = "libtorch.pipeline", .who = name_of_stage(from), .which = describe(next)});
  }
}

void StageLinks::forget_sent() {
  std::erase_if(sending_, [](const std::unique_ptr<Sending>& one) { return one->calls->done(); });
}

void StageLinks::settle() {
  for (const std::unique_ptr<Sending>& one : sending_) one->calls->wait();
  sending_.clear();
}

void StageLinks::abandon() noexcept {
  sending_.clear();
  arrived_.clear();
}

}  // namespace zeroth::libtorch
