#include "support/thread_ranks.h"

#include <zeroth/comm/decorators.h>
#include <zeroth/comm/mesh.h>
#include <zeroth/comm/received.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroth {
namespace {

using test::require;
using test::run_ranks;

std::vector<std::int32_t> members(const Communicator& comm, int rank) {
  const std::int32_t own = rank;
  std::vector<std::int32_t> all(static_cast<std::size_t>(comm.size()));
  comm.all_gather(std::span<const std::int32_t>(&own, 1), std::span(all));
  return all;
}

TEST(Mesh, AxesCutTheWorldLikeACArray) {
  run_ranks(12, [](int rank, const std::shared_ptr<CommBackend>& backend) {
    Mesh mesh(backend, {.axes = {{"dp", 2}, {"sp", 3}, {"tp", 2}}});
    require(
        mesh.coordinate("dp") == rank / 6 && mesh.coordinate("sp") == rank / 2 % 3 && mesh.coordinate("tp") == rank % 2,
        "coordinates");
    require(mesh.size("sp") == 3, "size");
    require(members(mesh.axis("tp"), rank) == std::vector<std::int32_t>{rank / 2 * 2, rank / 2 * 2 + 1}, "tp");
    const int corner = rank / 6 * 6 + rank % 2;
    require(members(mesh.axis("sp"), rank) == std::vector<std::int32_t>{corner, corner + 2, corner + 4}, "sp");
    require(members(mesh.axis("dp"), rank) == std::vector<std::int32_t>{rank % 6, rank % 6 + 6}, "dp");
    // A product of axes is one flat group in world order, however the names are ordered.
    const std::vector<std::string> names{"tp", "dp"};
    const int row = rank / 2 % 3 * 2;
    require(members(mesh.axes(names), rank) == std::vector<std::int32_t>{row, row + 1, row + 6, row + 7}, "dp*tp");
    require(&mesh.axes(names).backend() == &mesh.axes(names).backend(), "a group is made once");
    const std::vector<std::string> all{"dp", "sp", "tp"};
    require(&mesh.axes(all).backend() == backend.get(), "the whole world is the world's own group");
  });
}

TEST(Mesh, ReceivedBytesAreCountedByAxis) {
  run_ranks(4, [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const auto table = std::make_shared<TrafficTable>();
    const auto world = std::make_shared<CountingBackend>(backend->split(0, rank, "mesh"), table);
    const Mesh mesh(world, {.axes = {{"dp", 2}, {"tp", 2}}});
    std::vector<float> data(4096);  // 16 KiB: a sum in two phases receives as much in all
    mesh.axis("tp").all_reduce(std::span(data));
    mesh.axis("dp").broadcast(std::span(data), 0);
    const std::uint64_t from_root = mesh.coordinate("dp") == 0 ? 0 : 16'384;
    using Bytes = std::map<std::string, std::uint64_t>;
    require(mesh.received() == Bytes{{"dp", from_root}, {"tp", 16'384}}, table->text());
    const auto kinds = received_by_kind(mesh.axis("tp"));
    require(kinds.size() == 1 && kinds.at("all_reduce") == TrafficRow{.calls = 1, .bytes = 16'384}, table->text());
    require(received_bytes(mesh.world()) == 0, "the world's own group");
    reset_received(mesh.axis("tp"));
    require(mesh.received() == Bytes{{"dp", from_root}, {"tp", 0}}, "one group is forgotten");
    mesh.reset_received();
    require(mesh.received() == Bytes{{"dp", 0}, {"tp", 0}}, "all are");
    require(received_bytes(Communicator(backend)) == 0, "a group that does not count");
  });
}

TEST(Mesh, OneAxisIsTheWorldItself) {
  run_ranks(3, [](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    const Mesh mesh(backend, {.axes = {{"dp", 3}, {"tp", 1}}});
    require(&mesh.axis("dp").backend() == backend.get(), "no group of its own");
    require(mesh.axis("tp").size() == 1, "an axis of one");
    require(mesh.world().size() == 3, "world");
  });
}

TEST(Mesh, RanksThatGiveOtherAxesAreTold) {
  const test::RankReport report = test::try_ranks(4, [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const MeshSpec turned{.axes = {{"tp", 2}, {"dp", 2}}};
    const Mesh mesh(backend, rank == 2 ? turned : MeshSpec{.axes = {{"dp", 2}, {"tp", 2}}});
  });
  EXPECT_NE(report.text().find("MISMATCH"), std::string::npos) << report.text();
  EXPECT_NE(report.text().find("\"mesh tp=2 dp=2\" (rank 2)"), std::string::npos) << report.text();
}

TEST(Mesh, WhatCannotBeIsRefused) {
  run_ranks(2, [](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    const auto refuses = [&](const MeshSpec& spec, ErrorCode code, const std::string& text) {
      try {
        const Mesh mesh(backend, spec);
        [[maybe_unused]] const Communicator comm = mesh.axis("dp");
      } catch (const Error& error) {
        require(error.code() == code, error.what());
        require(std::string(error.what()).find(text) != std::string::npos, error.what());
        return;
      }
      throw std::runtime_error("not refused: " + text);
    };
    refuses({.axes = {{"dp", 3}}}, ErrorCode::kConfig, "size between 1 and the world size");
    refuses({.axes = {{"dp", 1}}}, ErrorCode::kConfig, "do not multiply");
    refuses({.axes = {}}, ErrorCode::kConfig, "do not multiply");
    refuses({.axes = {{"dp", 2}, {"tp", 2}}}, ErrorCode::kConfig, "do not multiply");
    refuses({.axes = {{"dp", 2}, {"dp", 1}}}, ErrorCode::kConfig, "one name");
    refuses({.axes = {{"", 2}}}, ErrorCode::kConfig, "needs a name");
    refuses({.axes = {{"pp", 2}}}, ErrorCode::kUsage, "one of pp");
  });
}

}  // namespace
}  // namespace zeroth
