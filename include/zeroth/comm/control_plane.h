// ControlPlane: what ranks say to each other beside the data, about themselves. One TCP connection and one small thread
// a rank; rank 0 is the hub. Never carries tensors; never needs the GIL, MPI or CUDA. So it works while a rank hangs in
// any of them.
//
// What it brings (all of it thrown by the waits of the transports, see RankWatch::judge):
//   after a second or two   kMismatch, where ranks wait for each other in different calls
//   at 1/4 of a deadline    a warning in rank 0's log: who is missing, where that rank is (file, line, phase), who
//   waits at the deadline         kTimeout on all ranks, with that line silent_after            kPeerLost for a rank
//   that others wait for and that gives no sign of life; a second after its end
//                           also on who is cut off from rank 0, and on rank 0 once it is cut off from all others,
//                           whatever they do
//   tell()                  an error of one rank on all
//   end_stuck_after         the end of a rank that does not come to a call that could throw any of this: it spins, or
//   sleeps
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/base/log.h>
#include <zeroth/comm/backend.h>
#include <zeroth/comm/rank_watch.h>

#include <cstdint>
#include <memory>
#include <string>

namespace zeroth {

struct ControlOptions {
  Milliseconds timeout{300'000};      ///< for joining
  Milliseconds silent_after{15'000};  ///< a rank without a sign of life for so long is lost; signs come four times as
                                      ///< often, or every second (3 ms a rank in large jobs)
  /// A process whose program has not heard of a verdict for so long, because it hangs in code of its own, is ended by
  /// its control thread: one line "ZEROTH ERROR [TIMEOUT] ..." on stderr, then _exit() with the code's exit code. 0:
  /// never; and never where ranks are threads of one process, nor after RankWatch::spare(). Not meant for who has been
  /// thrown an error once, or holds no group of the job any more.
  Milliseconds end_stuck_after{5'000};
  std::string interface{};  ///< "eth0": the hub listens there; "": on loopback if all ranks are on one host, else where
                            ///< `meeting_host` says
  /// The name or address at which the ranks of several hosts have met rank 0, MASTER_ADDR say: where that is an address
  /// of rank 0's own, the hub listens there alone, else on every interface but loopback.
  std::string meeting_host{};
  std::string
      trace_folder{};  ///< a rank that is judged writes why and its last calls there, as trace-rank3.jsonl; "": nowhere
  Logger logger{};     ///< rank 0's notes, and traces that could not be written
};

/// What every rank shall throw when this one stops the job with `error`: what it saw or heard of others as it is, for
/// that names them; an error of its own as kAborted, "rank 2 stopped the job: [MODEL] ...".
[[nodiscard]] Error end_of_job(int rank, const Error& error);

class ControlPlane {
 public:
  /// Collective over `base`, a seat in a group of all ranks of the job, with whose numbers `watch` speaks. The hub
  /// draws a secret and hands it out through `base`; who does not prove that he has it is dropped and counted. Throws
  /// kResource, on all ranks, if the hub cannot listen, and on the rank that does not reach it, with what it has found
  /// at each address.
  [[nodiscard]] static std::unique_ptr<ControlPlane> join(CommBackend& base, std::shared_ptr<RankWatch> watch,
                                                          const ControlOptions& options);
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;
  /// Says goodbye. Waits for nobody but its own thread. In a forked child, whose sockets are closed already, it does
  /// nothing.
  virtual ~ControlPlane() = default;

  /// Every rank's waits throw this error from now on, or one that another rank tells within a moment and that is nearer
  /// to the cause. Returns at once.
  virtual void tell(const Error& error) noexcept = 0;
  /// Hub: "127.0.0.1:40123"; else "".
  [[nodiscard]] virtual std::string address() const = 0;
  /// Hub: connections that were dropped because they did not show that they know the secret.
  [[nodiscard]] virtual std::uint64_t strangers() const = 0;

 protected:
  ControlPlane() = default;
};

}  // namespace zeroth
