// Progress: what a rank owes to others, done while it waits for something else.
//
// One-sided exchanges go on only when their ranks look. A rank that waits in another call, of whatever group, would
// leave the others without its part, and two such waits can close a circle. So who owes something registers it once
// (CommBackend::add_progress()), and every wait of the rank does it between two looks.
#pragma once

namespace zeroth {

class Progress {
 public:
  /// The wait ends with one rank of several, or the transport does not know whom it waits for.
  static constexpr int kAnyRank = -1;

  Progress() = default;
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  virtual ~Progress() = default;

  /// Does what can be done without waiting for others. Called on the thread that waits, between two looks at what it
  /// waits for; cheap where nothing has changed. Returns true while something of this rank is under way: a transport
  /// that nobody wakes then looks again within 1 ms, else within 20. What it throws ends the wait, and is
  /// thrown as it is; afterwards it does nothing.
  virtual bool advance() = 0;

  /// This rank has looked in vain since the last advance(), and sleeps until `rank` has done its part; numbers as
  /// add_progress() counts them.
  virtual void set_awaited(int rank) = 0;
  /// That wait is over.
  virtual void clear_awaited() noexcept = 0;
};

}  // namespace zeroth
