// A library that says it is NCCL, and has nothing else to say.
extern "C" int ncclGetVersion(int* version) {
  *version = ZEROTH_IMPOSTER_VERSION;
  return 0;
}
