#include "comm/mpi/mpi_transport.h"

#include <utility>

namespace zeroth::detail {
namespace {

class MpiTransfer final : public Transfer {
 public:
  MpiTransfer(std::shared_ptr<MpiWorld> mpi, MpiRequests requests)
      : mpi_(std::move(mpi)), requests_(std::move(requests)) {}
  ~MpiTransfer() override {
    if (!requests_.list.empty()) mpi_->forget(requests_);
  }
  bool wait(Milliseconds slice) override {
    return requests_.list.empty() || mpi_->wait(requests_, slice, MpiPatience::kSparing);
  }

 private:
  std::shared_ptr<MpiWorld> mpi_;
  MpiRequests requests_;
};

class MpiTransport final : public MessageTransport {
 public:
  explicit MpiTransport(std::shared_ptr<MpiWorld> mpi) : mpi_(std::move(mpi)) {}
  [[nodiscard]] int rank() const override { return mpi_->rank(); }
  [[nodiscard]] int size() const override { return mpi_->size(); }
  [[nodiscard]] std::string_view kind() const override { return "mpi"; }
  std::unique_ptr<Transfer> send(int to, std::uint32_t tag, std::span<const std::byte> bytes) override {
    return start(true, to, tag, const_cast<std::byte*>(bytes.data()), bytes.size());
  }
  std::unique_ptr<Transfer> receive(int from, std::uint32_t tag, std::span<std::byte> bytes) override {
    return start(false, from, tag, bytes.data(), bytes.size());
  }
  void abort(std::string_view text) noexcept override { mpi_->abort(text); }
  void check() override { mpi_->hear(); }

 private:
  std::unique_ptr<Transfer> start(bool sends, int peer, std::uint32_t tag, std::byte* data, std::size_t bytes) {
    return std::make_unique<MpiTransfer>(mpi_, mpi_->start(sends, peer, tag, data, bytes));
  }

  std::shared_ptr<MpiWorld> mpi_;
};

}  // namespace

std::shared_ptr<MessageTransport> make_mpi_transport(std::shared_ptr<MpiWorld> mpi) {
  return std::make_shared<MpiTransport>(std::move(mpi));
}

std::shared_ptr<MessageTransport> make_mpi_transport(const MpiTable& table, int rank, int size,
                                                     const CommOptions& options) {
  return make_mpi_transport(open_mpi_world(table, rank, size, options));
}

}  // namespace zeroth::detail
