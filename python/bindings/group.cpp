#include "group.h"

#include <zeroth/base/ended_ranks.h>
#include <zeroth/base/error.h>
#include <zeroth/base/log.h>
#include <zeroth/base/notices.h>
#include <zeroth/base/surroundings.h>
#include <zeroth/base/text.h>
#include <zeroth/libtorch/c10d.h>

#include <unistd.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::python {
namespace {

constexpr const char* kMaster = "MASTER_ADDR";
constexpr const char* kGlooInterface = "GLOO_SOCKET_IFNAME";
constexpr Milliseconds kLookEvery{200};

/// Gloo advertises the address of this host's own name, which is 127.0.1.1 on many: so it is told the interface that
/// leads to MASTER_ADDR.
std::string interface_to_others() {
  if (const std::string chosen = variable_or_empty("ZEROTH_INTERFACE"); !chosen.empty()) return chosen;
  const std::string master = variable_or_empty(kMaster);
  const std::string address = address_towards(master);
  std::vector<std::string> others;
  for (const Interface& interface : interfaces()) {
    if (interface.loopback) continue;
    if (interface.address == address) return interface.name;
    others.push_back(interface.name + " (" + interface.address + ")");
  }
  throw Error(ErrorCode::kEnvironment,
              "the ranks are on several hosts, and rank 0's address does not lead out of this one",
              {.where = "python.world",
               .which = std::string(kMaster) + "=" + master,
               .expected = "an address that every host reaches by an interface of its own: " + join(others, ", "),
               .got = address.empty() ? "no such host, or no way to it" : "loopback, " + address,
               .hint = "name rank 0's host by its address, or correct /etc/hosts here; ZEROTH_INTERFACE names an "
                       "interface in spite of it"});
}

/// Torch does not say which ranks have come.
std::string others_of(const World::RankAndSize& self) {
  if (self.size == 2) return "rank " + std::to_string(1 - self.rank);
  return "some of the other " + std::to_string(self.size - 1) + " ranks" + (self.rank == 0 ? "" : " (rank 0 listens)");
}

/// Ends this process if a rank has ended that the others still wait for.
void end_if_never_comes(const World::RankAndSize& self) {
  const std::optional<std::string> gone =
      rank_that_never_came(variable_or_empty("ZEROTH_JOB_ID"), self.rank, self.size);
  if (!gone) return;
  const Error error(ErrorCode::kPeerLost, *gone,
                    {.where = "torch.distributed",
                     .who = "rank " + std::to_string(self.rank) + "/" + std::to_string(self.size),
                     .expected = "all " + std::to_string(self.size) + " ranks",
                     .hint = kNeverCameHint});
  const std::string line = std::string("ZEROTH ERROR ") + error.what() + "\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  ::_exit(exit_code(error.code()));
}

/// A group of the same ranks whose messages are CPU memory. Collective for the group's members.
py::object gloo_beside(const py::module_& distributed, const py::object& group) {
  const py::object ranks = distributed.attr("get_process_group_ranks")(group);
  return distributed.attr("new_group")(ranks, py::arg("backend") = "gloo", py::arg("use_local_synchronization") = true,
                                       py::arg("group_desc") = "zeroth");
}

}  // namespace

World world_from_group(py::object group) {
  const py::module_ distributed = py::module_::import("torch.distributed");
  ZR_CHECK(distributed.attr("is_available")().cast<bool>() && distributed.attr("is_initialized")().cast<bool>(),
           ErrorCode::kUsage, "torch.distributed is not initialised",
           {.where = "python.world", .hint = "call torch.distributed.init_process_group(\"gloo\") first"});
  if (group.is_none()) group = distributed.attr("group").attr("WORLD");
  ZR_CHECK(py::hasattr(group, "group_name"), ErrorCode::kUsage, "this rank is not in the group, or it is none",
           {.where = "python.world",
            .expected = "a torch.distributed.ProcessGroup",
            .got = py::repr(group).cast<std::string>(),
            .hint = "make the engine on the members of the group only"});
  const bool cpu = group.attr("_device_types").contains(py::module_::import("torch").attr("device")("cpu"));
  const std::string beside = cpu ? "" : distributed.attr("get_backend")(group).cast<std::string>();
  if (!cpu) group = gloo_beside(distributed, group);
  return libtorch::world_from_c10d(group.attr("group_name").cast<std::string>(), beside);
}

World world_from_environment() {
  const std::optional<World::RankAndSize> started_as = World::without_transport();
  const py::module_ distributed = py::module_::import("torch.distributed");
  if (!started_as || !distributed.attr("is_available")().cast<bool>()) return World::from_environment();
  if (!distributed.attr("is_initialized")().cast<bool>()) {
    if (variable_or_empty(kMaster).empty() || variable_or_empty("MASTER_PORT").empty())
      return World::from_environment();
    if (variable_or_empty(kGlooInterface).empty())
      py::module_::import("os").attr("environ")[kGlooInterface] = interface_to_others();
    const std::string whom = "waiting for " + others_of(*started_as) + " for ";
    const std::string where = ", at " + variable_or_empty(kMaster) + ":" + variable_or_empty("MASTER_PORT") +
                              " (torch.distributed); hint: start the other ranks, or all of them with zeroth-run; for "
                              "one rank alone unset the variables of the launcher";
    const Logger log(started_as->rank, started_as->size);
    const NoticeThread notices({}, [&](const std::string& waited) { log.warn(whom + waited + where); });
    // Torch waits in a library, where no error of ours could be thrown.
    const NoticeThread look({.first = kLookEvery, .every = kLookEvery},
                            [&](const std::string&) { end_if_never_comes(*started_as); });
    distributed.attr("init_process_group")("gloo", py::arg("rank") = started_as->rank,
                                           py::arg("world_size") = started_as->size);
  }
  World world = world_from_group(py::none());
  ZR_CHECK((World::RankAndSize{.rank = world.rank(), .size = world.size()} == *started_as), ErrorCode::kEnvironment,
           "torch.distributed and the environment speak of different worlds",
           {.where = "python.world",
            .which = "torch.distributed: rank " + std::to_string(world.rank()) + " of " + std::to_string(world.size()),
            .expected = "rank " + std::to_string(started_as->rank) + " of " + std::to_string(started_as->size) +
                        ", as the variables of the launcher say",
            .hint = "start the ranks with a launcher, or pass world=zeroth.World.from_group()"});
  return world;
}

}  // namespace zeroth::python
