#include <kernels/topk/topk_cpu.inl>

namespace zeroth::kernels::detail {

void topk_count_scalar(const TopkCountArgs& args) {
  topk_count_any<Lane>(args);
}
std::int64_t topk_take_scalar(const TopkTakeArgs& args) {
  return topk_take_any<Lane>(args);
}
std::int64_t topk_collect_scalar(const TopkCollectArgs& args) {
  return topk_collect_any<Lane>(args);
}
void topk_add_scalar(const TopkAddArgs& args) {
  for (int source = 0; source < args.num_sources; ++source) {
    const TopkSource& from = args.sources[source];
    for (std::int64_t j = 0; j < from.k; ++j) topk_add_element(args.dst, from.places[j], from.values[j], args.factor);
  }
}

}  // namespace zeroth::kernels::detail
