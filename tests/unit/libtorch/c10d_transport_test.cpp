// The transport over a group of torch's, on a group whose messages go through the tests' hub: a send ends when its
// receive is posted, no sooner.
#include "support/message_hub.h"
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/libtorch/c10d.h>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace zeroth::libtorch {
namespace {

class HubWork final : public c10d::Work {
 public:
  explicit HubWork(std::unique_ptr<Transfer> transfer) : transfer_(std::move(transfer)) {}

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    while (!transfer_->wait(Milliseconds{20})) {
      if (aborted_.load()) return false;
    }
    return true;
  }
  void abort() override { aborted_.store(true); }

 private:
  std::unique_ptr<Transfer> transfer_;
  std::atomic<bool> aborted_ = false;
};

class HubBackend final : public c10d::Backend {
 public:
  HubBackend(std::shared_ptr<MessageTransport> transport)
      : c10d::Backend(transport->rank(), transport->size()), transport_(std::move(transport)) {}

  [[nodiscard]] const std::string getBackendName() const override { return "hub"; }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    const auto* const data = static_cast<const std::byte*>(tensors.front().const_data_ptr());
    const auto bytes = static_cast<std::size_t>(tensors.front().numel());
    return c10::make_intrusive<HubWork>(transport_->send(to, static_cast<std::uint32_t>(tag), {data, bytes}));
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    auto* const data = static_cast<std::byte*>(tensors.front().mutable_data_ptr());
    const auto bytes = static_cast<std::size_t>(tensors.front().numel());
    return c10::make_intrusive<HubWork>(transport_->receive(from, static_cast<std::uint32_t>(tag), {data, bytes}));
  }

 private:
  std::shared_ptr<MessageTransport> transport_;
};

/// Runs `body` on every rank of a group of torch's.
void run_over_torch(int world, const std::function<void(const Communicator&)>& body) {
  const auto hub = std::make_shared<test::MessageHub>(world);
  const test::RankReport report =
      test::try_ranks(world, [&](int rank, const std::shared_ptr<CommBackend>& /*harness*/) {
        const std::string name = "hub-" + std::to_string(world) + "-" + std::to_string(rank);
        const auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, world);
        group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                          c10::make_intrusive<HubBackend>(hub->transport(rank)));
        c10d::register_process_group(name, group);
        {
          const std::shared_ptr<CommBackend> backend =
              make_message_backend(make_c10d_transport(name), test::quick_options());
          EXPECT_EQ(backend->kind(), "c10d hub");
          body(Communicator(backend));
        }
        c10d::unregister_process_group(name);
      });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST(C10dTransport, CallsAndMessagesInTurn) {
  for (const int world : {2, 3}) {
    run_over_torch(world, [](const Communicator& comm) {
      for (const std::size_t count : {std::size_t{3}, std::size_t{20'000}}) {
        std::vector<std::int64_t> data(count, comm.rank() + 1);
        const int next = (comm.rank() + 1) % comm.size();
        const int previous = (comm.rank() + comm.size() - 1) % comm.size();
        std::vector<std::int64_t> in(count);
        const Collective calls[] = {comm.send_call(std::span<const std::int64_t>(data), next),
                                    comm.recv_call(std::span(in), previous)};
        comm.batch(calls);
        test::require(in.back() == previous + 1, "a message");
        comm.all_reduce(std::span(data));
        test::require(data.back() == comm.size() * (comm.size() + 1) / 2, "a sum");
      }
    });
  }
}

TEST(C10dTransport, AMessageThatIsLateDoesNotHideAnotherSenders) {
  run_over_torch(3, [](const Communicator& comm) {
    std::vector<float> data(10'000, static_cast<float>(comm.rank()));
    std::int32_t turn = 0;
    if (comm.rank() == 0) {
      std::vector<float> from_1(data.size());
      std::vector<float> from_2(data.size());
      const Collective calls[] = {comm.recv_call(std::span(from_1), 1), comm.recv_call(std::span(from_2), 2)};
      comm.batch(calls);
      test::require(from_1.back() == 1 && from_2.back() == 2, "messages of both");
    } else if (comm.rank() == 1) {  // after the other one's message has arrived
      comm.recv(std::span(&turn, 1), 2);
      comm.send(std::span<const float>(data), 0);
    } else {
      comm.send(std::span<const float>(data), 0);
      comm.send(std::span<const std::int32_t>(&turn, 1), 1);
    }
  });
}

}  // namespace
}  // namespace zeroth::libtorch
