// ControlPlane: messages between ranks about their own state, beside the data. Each rank has one TCP connection to rank
// 0, the hub, and one small thread. It never carries tensors and never needs the GIL, MPI or CUDA. So it works while a
// rank hangs in any of them.
//
// Results, thrown by the waits of the transports (see RankActivity::judge):
//   after 1 to 2 s         kMismatch, if ranks wait for each other in different calls
//   1/4 of a deadline      a warning in rank 0's log: the missing rank, its place (file, line, phase), the waiting
//   ranks the deadline           kTimeout on all ranks, with that line
//   silent_after           kPeerLost for an awaited rank without a sign of life, or 1 s after its end. Also on a rank
//                          that is cut off from rank 0, and on rank 0 if it is cut off from all others, in any phase
//   tell()                 an error of one rank, on all ranks
//   end_stuck_after        the end of a rank that spins or sleeps and so comes to no call that could throw the error
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/base/log.h>
#include <zeroth/comm/backend.h>
#include <zeroth/comm/rank_activity.h>

#include <cstdint>
#include <memory>
#include <string>

namespace zeroth {

struct ControlOptions {
  Milliseconds timeout{300'000};      ///< of join()
  Milliseconds silent_after{15'000};  ///< a rank without a sign of life for this time is lost; signs come four times as
                                      ///< often, or every second (3 ms per rank in large jobs)
  /// Time after a verdict at which the control thread ends a process that hangs in its own code and has not received
  /// the verdict: one line "ZEROTH ERROR [TIMEOUT] ..." on stderr, then _exit() with the code's exit code. 0: never. It
  /// also never ends ranks that are threads of one process, a process after RankActivity::spare(), a process that has
  /// already received an error, and a process without a group of the job.
  Milliseconds end_stuck_after{5'000};
  std::string interface{};  ///< "eth0": the hub listens there; "": on loopback if all ranks are on one host, else see
                            ///< `meeting_host`
  /// Name or address at which ranks of several hosts reach rank 0, such as MASTER_ADDR. If it is an address of rank 0's
  /// host, the hub listens there only; otherwise on every interface but loopback.
  std::string meeting_host{};
  std::string trace_folder{};  ///< folder for a record of the error and the last calls, trace-rank3.jsonl; "": none
  Logger logger{};             ///< rank 0's notes, and traces that could not be written
};

/// The error that all ranks throw when rank `rank` stops the job with `error`. An error about another rank stays as it
/// is. An error of its own becomes kAborted: "rank 2 stopped the job: [MODEL] ...".
[[nodiscard]] Error end_of_job(int rank, const Error& error);

class ControlPlane {
 public:
  /// Collective over `base`, blocks. `base`: a group of all ranks of the job, borrowed for this call. `activity`
  /// is shared and uses the same rank numbers. The hub draws a secret and sends it through `base`. A connection without
  /// proof of the secret is dropped and counted. Throws kResource: on all ranks if the hub cannot listen; on a rank
  /// that does not reach the hub, with the result of each address.
  [[nodiscard]] static std::unique_ptr<ControlPlane> join(CommBackend& base, std::shared_ptr<RankActivity> activity,
                                                          const ControlOptions& options);
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;
  /// Sends a goodbye. Waits for its own thread only. In a forked child, whose sockets are already closed, it does
  /// nothing.
  virtual ~ControlPlane() = default;

  /// From now on the waits of all ranks throw this error, or an error that another rank tells within a moment and that
  /// is nearer to the cause. Returns at once.
  virtual void tell(const Error& error) noexcept = 0;
  /// On the hub: "127.0.0.1:40123". On other ranks: "".
  [[nodiscard]] virtual std::string address() const = 0;
  /// On the hub: number of connections that were dropped because they did not prove the secret.
  [[nodiscard]] virtual std::uint64_t strangers() const = 0;

 protected:
  ControlPlane() = default;
};

}  // namespace zeroth
