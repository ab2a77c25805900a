#include "comm/started_points.h"

#include <string>
#include <utility>

namespace zeroth::detail {
namespace {

class Nothing final : public PendingPoints {
 public:
  bool done() override { return true; }
  void wait() override {}
};

/// One look at them, from whatever wait.
class Look final : public Progress {
 public:
  explicit Look(std::unique_ptr<PendingPoints> points) : points_(std::move(points)) {}

  bool advance() override {
    if (over_ || inside_) return false;
    return !done();
  }
  void set_awaited(int /*rank*/) override {}
  void clear_awaited() noexcept override {}

  bool done() {
    return enter([this] { return over_ = points_->done(); });
  }
  void wait() {
    enter([this] {
      points_->wait();
      return over_ = true;
    });
  }

 private:
  /// A wait inside of `body` does not come in again, and after an error no wait does.
  template <class Body>
  bool enter(const Body& body) {
    inside_ = true;
    try {
      const bool done = body();
      inside_ = false;
      return done;
    } catch (...) {
      over_ = true;
      inside_ = false;
      throw;
    }
  }

  std::unique_ptr<PendingPoints> points_;
  bool inside_ = false;
  bool over_ = false;
};

class MovedByOthers final : public PendingPoints {
 public:
  explicit MovedByOthers(std::shared_ptr<Look> look) : look_(std::move(look)) {}
  bool done() override { return look_->done(); }
  void wait() override { look_->wait(); }

 private:
  std::shared_ptr<Look> look_;
};

}  // namespace

void validate_points(std::span<const Collective> points, int rank, int size, std::string_view where) {
  for (const Collective& point : points) {
    ZR_CHECK(is_point_to_point(point.kind), ErrorCode::kUsage, "only sends and receives can be started",
             {.where = std::string(where),
              .which = describe(point),
              .expected = "send or recv",
              .got = std::string(name_of(point.kind)),
              .hint = "submit() the other calls"});
    validate(point, rank, size, where);
  }
}

std::unique_ptr<PendingPoints> nothing_pending() {
  return std::make_unique<Nothing>();
}

Error given_up(std::string where, std::string who) {
  return Error(ErrorCode::kUsage, "messages that were started have been given up before they were done",
               {.where = std::move(where),
                .who = std::move(who),
                .expected = "wait(), or done() that was true, before their PendingPoints goes",
                .hint = "an exception before this one may be why"});
}

std::unique_ptr<PendingPoints> also_moved_by(std::unique_ptr<PendingPoints> points,
                                             FunctionRef<void(const std::weak_ptr<Progress>&)> add) {
  if (points->done()) return points;
  auto look = std::make_shared<Look>(std::move(points));
  add(look);
  return std::make_unique<MovedByOthers>(std::move(look));
}

}  // namespace zeroth::detail
