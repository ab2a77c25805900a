#include "hosts/site_messages.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace zeroth {
namespace {

/// In one call: one that never stops talking must not keep the hub from the others.
constexpr std::size_t kMostBytesAtOnce = std::size_t{8} << 20U;

}  // namespace

std::string text_of_sites(SiteSet sites) {
  std::string text;
  int count = 0;
  for (int site = 0; site < kMostSites; ++site) {
    if (!has_site(sites, site)) continue;
    text += (count++ > 0 ? ", " : "") + std::to_string(site);
  }
  if (count == 0) return "no site";
  return (count == 1 ? "site " : "sites ") + text;
}

SiteStream::SiteStream(int socket) : socket_(socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void SiteStream::send(SiteHead head, SiteBytes payload) {
  head.bytes = payload ? payload->size() : 0;
  std::string bytes(sizeof head, '\0');
  std::memcpy(bytes.data(), &head, sizeof head);
  out_.push_back({.bytes = std::make_shared<const std::string>(std::move(bytes))});
  if (head.bytes > 0) out_.push_back({.bytes = std::move(payload)});
  flush();
}

void SiteStream::flush() {
  while (wants_to_write()) {
    Part& part = out_.front();
    const ssize_t sent =
        ::send(socket_, part.bytes->data() + part.sent, part.bytes->size() - part.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      broken_ = errno != EAGAIN && errno != EWOULDBLOCK;
      return;
    }
    part.sent += static_cast<std::size_t>(sent);
    if (part.sent == part.bytes->size()) out_.pop_front();
  }
}

bool SiteStream::receive(const Take& take) {
  for (std::size_t read = 0; read < kMostBytesAtOnce;) {
    const bool in_head = head_has_ < sizeof head_;
    char* const to = in_head ? reinterpret_cast<char*>(&head_) + head_has_ : payload_.data() + payload_has_;
    const std::size_t room = in_head ? sizeof head_ - head_has_ : payload_.size() - payload_has_;
    if (room > 0) {
      const ssize_t got = ::recv(socket_, to, std::min(room, kMostBytesAtOnce), MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
      if (got <= 0) return false;
      (in_head ? head_has_ : payload_has_) += static_cast<std::size_t>(got);
      read += static_cast<std::size_t>(got);
      if (static_cast<std::size_t>(got) < room) continue;
    }
    if (in_head) {
      if (head_.magic != SiteHead::kMagic || head_.bytes > largest_) return false;
      payload_.assign(static_cast<std::size_t>(head_.bytes), '\0');
      payload_has_ = 0;
      if (head_.bytes > 0) continue;
    }
    head_has_ = 0;
    take(head_, std::exchange(payload_, {}));
  }
  return true;
}

}  // namespace zeroth
