// The types and numbers of our tables are those of the vendor's headers. Compiled where the headers are; needs neither
// GPU nor library.
#include "comm/nccl/nccl_calls.h"
#include "comm/nccl/nccl_table.h"
#include "device/cuda/cuda_table.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <cstddef>

namespace zeroth::detail {
namespace {

template <class Ours, class Theirs>
consteval bool same(Ours ours, Theirs theirs) {
  return static_cast<long long>(ours) == static_cast<long long>(theirs);
}

static_assert(same(NcclStatus::kSuccess, ncclSuccess) && same(NcclStatus::kCudaError, ncclUnhandledCudaError));
static_assert(same(NcclStatus::kSystemError, ncclSystemError) && same(NcclStatus::kInternalError, ncclInternalError));
static_assert(same(NcclStatus::kInvalidArgument, ncclInvalidArgument) &&
              same(NcclStatus::kInvalidUsage, ncclInvalidUsage));
static_assert(same(NcclStatus::kRemoteError, ncclRemoteError) && same(NcclStatus::kInProgress, ncclInProgress));
static_assert(sizeof(NcclStatus) == sizeof(ncclResult_t));
static_assert(same(NcclOp::kSum, ncclSum) && same(NcclOp::kProduct, ncclProd) && same(NcclOp::kMax, ncclMax) &&
              same(NcclOp::kMin, ncclMin));
static_assert(sizeof(NcclOp) == sizeof(ncclRedOp_t));
static_assert(same(NcclType::kInt8, ncclInt8) && same(NcclType::kUInt8, ncclUint8) &&
              same(NcclType::kInt32, ncclInt32));
static_assert(same(NcclType::kUInt32, ncclUint32) && same(NcclType::kInt64, ncclInt64) &&
              same(NcclType::kUInt64, ncclUint64));
static_assert(same(NcclType::kFloat16, ncclFloat16) && same(NcclType::kFloat32, ncclFloat32) &&
              same(NcclType::kFloat64, ncclFloat64));
static_assert(same(NcclType::kBFloat16, ncclBfloat16) && sizeof(NcclType) == sizeof(ncclDataType_t));
static_assert(sizeof(NcclId) == sizeof(ncclUniqueId));
static_assert(same(kNcclUnset, NCCL_CONFIG_UNDEF_INT) && same(kNcclNoColor, NCCL_SPLIT_NOCOLOR));
static_assert(same(kNcclLeastVersion, NCCL_VERSION(2, 18, 0)));

// A config of ours is the beginning of theirs.
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
static_assert(offsetof(NcclConfig, size) == offsetof(ncclConfig_t, size) &&
              offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version) &&
              offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(NcclConfig, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(NcclConfig, least_ctas) == offsetof(ncclConfig_t, minCTAs) &&
              offsetof(NcclConfig, most_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(NcclConfig, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(NcclConfig, split_share) == offsetof(ncclConfig_t, splitShare));

static_assert(kCudaSuccess == cudaSuccess && kCudaInvalidValue == cudaErrorInvalidValue &&
              kCudaOutOfMemory == cudaErrorMemoryAllocation);
static_assert(kCudaInsufficientDriver == cudaErrorInsufficientDriver && kCudaNoDevice == cudaErrorNoDevice &&
              kCudaNotReady == cudaErrorNotReady);
static_assert(kCudaStreamNonBlocking == cudaStreamNonBlocking && kCudaEventDisableTiming == cudaEventDisableTiming);
static_assert(kCudaHostPortable == cudaHostAllocPortable && same(kCudaCopyAnyWay, cudaMemcpyDefault));
static_assert(same(kCudaMemoryUnknown, cudaMemoryTypeUnregistered) && same(kCudaMemoryHost, cudaMemoryTypeHost));
static_assert(same(kCudaMemoryDevice, cudaMemoryTypeDevice) && same(kCudaMemoryManaged, cudaMemoryTypeManaged));
static_assert(sizeof(CudaPointer) >= sizeof(cudaPointerAttributes) && sizeof(CudaStatus) == sizeof(cudaError_t));
static_assert(offsetof(CudaPointer, type) == offsetof(cudaPointerAttributes, type) &&
              offsetof(CudaPointer, device) == offsetof(cudaPointerAttributes, device));
static_assert(offsetof(CudaPointer, device_address) == offsetof(cudaPointerAttributes, devicePointer));
static_assert(offsetof(CudaPointer, host_address) == offsetof(cudaPointerAttributes, hostPointer));

// Calls that the tables make compile against the vendor's declarations, argument by argument.
[[maybe_unused]] void declarations(ncclComm_t comm, cudaStream_t stream, const void* from, void* to, std::size_t count,
                                   ncclConfig_t* config, void* handle) {
  const ncclDataType_t type = ncclFloat32;
  const ncclRedOp_t op = ncclSum;
  ncclUniqueId id;
  ncclResult_t status = ncclGetUniqueId(&id);
  status = ncclCommInitRankConfig(&comm, 1, id, 0, config);
  status = ncclCommSplit(comm, 0, 0, &comm, config);
  status = ncclCommGetAsyncError(comm, &status);
  status = ncclAllGather(from, to, count, type, comm, stream);
  status = ncclReduceScatter(from, to, count, type, op, comm, stream);
  status = ncclAllReduce(from, to, count, type, op, comm, stream);
  status = ncclReduce(from, to, count, type, op, 0, comm, stream);
  status = ncclBroadcast(from, to, count, type, 0, comm, stream);
  status = ncclSend(from, count, type, 0, comm, stream);
  status = ncclRecv(to, count, type, 0, comm, stream);
  status = ncclCommRegister(comm, to, count, &handle);
  status = ncclCommDeregister(comm, handle);
  (void)status;
}

TEST(NcclAbi, TheVersionOfTheHeaderReadsBack) {
  EXPECT_EQ(nccl_version_text(NCCL_VERSION_CODE),
            std::to_string(NCCL_MAJOR) + "." + std::to_string(NCCL_MINOR) + "." + std::to_string(NCCL_PATCH));
}

}  // namespace
}  // namespace zeroth::detail
