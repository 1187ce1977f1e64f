"""The error of a request that the API server refused or did not answer."""

from gpulease.client.errors import GpuLeaseError


class ClusterRefused(GpuLeaseError):
    """The API server refused a request, or did not answer.

    Attributes:
        code: The HTTP status of the refusal; 0 without an answer.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        hints = {
            0: "The request will be repeated",
            403: "Apply the driver's ClusterRole: client/integrations/kubernetes/manifests/driver.yaml",
            404: "resource.k8s.io/v1 needs Kubernetes 1.34; if the object existed before, it was deleted",
        }
        super().__init__(message, hints.get(code, ""))
        self.code = code
